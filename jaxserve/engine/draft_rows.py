"""The drafts that rows of a step bring: where there is room for them, and what came of them. Host only."""

from __future__ import annotations

from jaxserve.engine.limits import SchedulerLimits
from jaxserve.engine.page_pool import PagePool
from jaxserve.engine.schedule import DecodeRow, SampledTokens, ScheduledBatch
from jaxserve.engine.sequence import SequenceStatus


def with_drafts(row: DecodeRow, length: int, limits: SchedulerLimits, pages: PagePool) -> DecodeRow:
    """A row with up to `length` drafts, as far as there is room without taking anything from others."""
    sequence = row.sequence
    most_computed = sequence.num_computed + sequence.num_drafts_in_flight
    useful = sequence.max_output_tokens - sequence.num_output_launched
    count = min(length, useful, limits.longest_sequence - most_computed)
    if count <= 0:
        return row
    room = len(sequence.pages) * limits.page_size - most_computed
    if room < count:
        page = pages.allocate(1)  # one is enough: drafts are fewer than a page has tokens
        if page is not None:
            row = row._replace(new_page=page[0], new_page_index=len(sequence.pages))
            sequence.pages += page
            room += limits.page_size
    count = min(count, room)
    sequence.num_drafts_in_flight += count
    sequence.drafted_at = sequence.num_output_launched
    return row._replace(num_drafts=count)


def take_verified(batch: ScheduledBatch, sampled: SampledTokens) -> None:
    """Corrects how far the sequences of a step with drafts are computed, now that it is known."""
    for row, count in zip(batch.decode, sampled.counts.tolist(), strict=True):
        sequence = row.sequence
        if sequence.status is SequenceStatus.RUNNING:  # others have given their pages back
            sequence.num_drafts_in_flight -= row.num_drafts
            if not sequence.num_known_in_flight:  # else it has gone on from forced tokens, whatever was drawn
                sequence.num_computed += count - 1
