"""The shared HTTP helpers: who may call, how large a body may be, and how errors travel."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgpack
import pytest
from aiohttp import ClientSession, web

from async_search_rl.config.run import SecuritySection
from async_search_rl.errors import ConfigError, DeadlineError, SchemaError, SearchRLError, ServiceError, TooLargeError
from async_search_rl.http import (
    MSGPACK,
    OverloadedError,
    UnauthorizedError,
    announce,
    client_session,
    is_loopback,
    listening,
    make_app,
    read_token,
    reply_error,
    require_safe_bind,
)


def run(scenario: Callable[[str], Awaitable[None]], error: Exception | None = None, token: str | None = "secret") -> None:
    async def handler(request: web.Request) -> web.Response:
        await request.read()
        if error is not None:
            raise error
        return web.Response(text="fine")

    async def main() -> None:
        app = make_app(token, max_body_bytes=1000)
        app.router.add_route("*", "/x", handler)
        app.router.add_get("/health", handler)
        async with asyncio.timeout(20), listening(app, "127.0.0.1", 0, token, stop_timeout_s=0.1) as url:
            await scenario(url)

    asyncio.run(main())


async def error_of(session: ClientSession, url: str, **options: object) -> SearchRLError:
    async with session.post(url, **options) as reply:  # type: ignore[arg-type]
        assert reply.status >= 400
        return await reply_error(reply)


@pytest.mark.parametrize("sent", [None, "wrong", "sécret"])
def test_only_the_bearer_of_the_token_may_call(sent: str | None) -> None:
    async def scenario(url: str) -> None:
        async with client_session(None, 5) as session:
            headers = {} if sent is None else {"Authorization": f"Bearer {sent}"}
            assert isinstance(await error_of(session, url + "/x", headers=headers), UnauthorizedError)
            async with session.get(url + "/health") as reply:
                assert reply.status == 200
        async with client_session("secret", 5) as session, session.post(url + "/x") as reply:
            assert await reply.text() == "fine"

    run(scenario)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (SchemaError("topk must be an integer"), SchemaError),
        (TooLargeError("queries must be fewer"), TooLargeError),
        (DeadlineError("must end within 1 s"), DeadlineError),
        (OverloadedError("the queue is full", 7.0), OverloadedError),
        (ServiceError("the index failed"), ServiceError),
        (RuntimeError("a secret of the inside"), ServiceError),
    ],
)
@pytest.mark.parametrize("content_type", ["application/json", MSGPACK])
def test_errors_arrive_as_they_were_raised(raised: Exception, kind: type[SearchRLError], content_type: str) -> None:
    async def scenario(url: str) -> None:
        async with client_session("secret", 5) as session:
            error = await error_of(session, url + "/x", data=b"", headers={"Content-Type": content_type})
        assert type(error) is kind
        assert (str(raised) in str(error)) == isinstance(raised, SearchRLError)
        if isinstance(error, OverloadedError):
            assert error.retry_after_s == 7.0

    run(scenario, raised)


def test_msgpack_callers_get_msgpack() -> None:
    async def scenario(url: str) -> None:
        async with client_session("secret", 5) as session, session.post(url + "/x", headers={"Accept": MSGPACK}) as reply:
            assert msgpack.unpackb(await reply.read()) == {"error": "SchemaError", "message": "wrong"}

    run(scenario, SchemaError("wrong"))


def test_bodies_are_capped_and_unknown_paths_named() -> None:
    async def scenario(url: str) -> None:
        async with client_session("secret", 5) as session:
            assert isinstance(await error_of(session, url + "/x", data=b"x" * 1001), TooLargeError)
            assert "/nowhere" in str(await error_of(session, url + "/nowhere"))

    run(scenario)


def test_a_busy_port_is_a_config_error() -> None:
    async def scenario(url: str) -> None:
        port = int(url.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"cannot bind 127.0.0.1:{port}"):
            async with listening(web.Application(), "127.0.0.1", port, None):
                pass

    run(scenario)


def test_other_machines_need_a_token() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        assert is_loopback(host)
        require_safe_bind(host, None)
    for host in ("0.0.0.0", "192.168.0.1", "::", "example.org", ""):
        with pytest.raises(ConfigError, match="token"):
            require_safe_bind(host, None)
        require_safe_bind(host, "secret")


def test_the_token_comes_from_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASYNC_SEARCH_RL_TOKEN", raising=False)
    assert read_token(SecuritySection()) is None
    monkeypatch.setenv("ASYNC_SEARCH_RL_TOKEN", "from-environment")
    assert read_token(SecuritySection()) == "from-environment"
    file = tmp_path / "token"
    file.write_text("from-file\n", encoding="ascii")
    assert read_token(SecuritySection(token_file=str(file))) == "from-file"
    file.write_text("\n", encoding="ascii")
    for path in (file, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"security\.token_file"):
            read_token(SecuritySection(token_file=str(path)))


def test_an_announcement_is_one_line(tmp_path: Path) -> None:
    announce(tmp_path / "run" / "search.url", "http://127.0.0.1:1")
    assert (tmp_path / "run" / "search.url").read_text(encoding="ascii") == "http://127.0.0.1:1\n"
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_a_body_that_is_not_what_its_encoding_says_is_the_callers_fault() -> None:
    async def scenario(url: str) -> None:
        async with client_session("secret", 5) as session:
            error = await error_of(session, url + "/x", data=b"plain", headers={"Content-Encoding": "gzip"}, compress=False)
            assert isinstance(error, SchemaError)
            assert "Content-Encoding" in str(error)

    run(scenario)


def test_a_caller_that_hangs_up_in_the_middle_is_no_failure_of_the_service(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(url: str) -> None:
        address = urlsplit(url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        head = b"POST /x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 100\r\n\r\n"
        writer.write(head + b"half")
        await writer.drain()
        async with client_session("secret", 5) as session:
            for _ in range(2):  # once before the other one hangs up, so that it is being served, and once after
                async with session.post(url + "/x", data=b"whole") as reply:
                    assert await reply.text() == "fine"
                writer.close()

    with caplog.at_level("INFO", logger="async_search_rl.http"):
        run(scenario)
    assert [record.getMessage() for record in caplog.records if record.name == "async_search_rl.http"] == [
        "POST /x: the caller hung up"
    ]
