"""POST /flush_cache: done for administrators, and for nobody else where there are keys."""

from __future__ import annotations

import pytest

from jaxserve.config import ServerConfig
from tests.fakes import FakeEngine, say
from tests.server.harness import client_of

pytestmark = pytest.mark.anyio


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("config", "key", "status"),
    [
        (ServerConfig(), None, 200),
        (ServerConfig(api_keys=("user",)), "user", 401),
        (ServerConfig(api_keys=("user",), admin_api_keys=("admin",)), "user", 401),
        (ServerConfig(api_keys=("user",), admin_api_keys=("admin",)), "admin", 200),
        (ServerConfig(admin_api_keys=("admin",)), None, 401),
        (ServerConfig(admin_api_keys=("admin",)), "admin", 200),
    ],
)
async def test_who_may_flush(config: ServerConfig, key: str | None, status: int) -> None:
    engine = FakeEngine(say("x"))
    async with client_of(engine, config, bearer(key) if key else None) as client:
        answer = await client.post("/flush_cache")
        assert answer.status_code == status
        assert engine.num_flushed == (status == 200)
        if status == 200:
            assert answer.json() == {"freed_pages": 7}


async def test_an_administrators_key_opens_the_rest_too() -> None:
    both = ServerConfig(api_keys=("user",), admin_api_keys=("admin",))
    async with client_of(FakeEngine(say("x")), both, bearer("admin")) as client:
        assert (await client.get("/v1/models")).status_code == 200
    async with client_of(FakeEngine(say("x")), ServerConfig(admin_api_keys=("admin",))) as client:
        assert (await client.get("/v1/models")).status_code == 200  # no key is asked for where only the other is set
