"""The padded arrays that a forward pass works on."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Int32


@struct.dataclass
class Batch:
    """Tokens of one step: first one token for each decode row, then the prefill chunks one after the other.

    Padding: decode rows with `decode_kv_lens` 0; prefill rows with no query tokens; tokens whose `write_pages` lies past
    the last page. Either part may be empty (a size of 0 in the shapes).
    """

    token_ids: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    write_pages: Int32[Array, " tokens"]  # page that the token's key and value go to
    write_offsets: Int32[Array, " tokens"]  # place within that page
    decode_page_table: Int32[Array, "decode_rows pages_per_seq"]
    decode_kv_lens: Int32[Array, " decode_rows"]  # with this step's token
    prefill_page_table: Int32[Array, "prefill_rows pages_per_seq"]
    prefill_query_starts: Int32[Array, " prefill_rows_plus_1"]  # counted from the first prefill token
    prefill_kv_lens: Int32[Array, " prefill_rows"]  # with this step's chunk
