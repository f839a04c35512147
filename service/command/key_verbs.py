"""`automap keys`: makes, lists and revokes API keys, in the store itself. For the person who runs the service."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from automap.errors import UserError, one_of
from automap.records import to_json
from service.command.options import JsonOption
from service.command.output import print_json, say
from service.command.server_settings import read_settings

if TYPE_CHECKING:
    from service.jobs.keys import Key, Keys

DAY_S = 24 * 3600.0

app = typer.Typer(
    name="keys", no_args_is_help=True, help="Makes, lists and revokes the API keys of a service, in its store."
)


@app.command()
def create(
    tenant: Annotated[
        str, typer.Option(help="The tenant whose models and jobs the key gives access to, such as vision-team.")
    ],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What the key allows: read, submit or admin (/metrics, and deletion of all that the tenant has); may "
            "be repeated; default: read and submit."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="A note: who has the key, and what for.")] = "",
    days: Annotated[
        float | None, typer.Option(min=1e-3, help="Days after which the key expires; default: never.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Makes a key and prints it; it cannot be shown again."""
    from service.jobs.keys import SCOPES

    for given in scope or ():
        if given not in SCOPES:
            raise UserError("no such scope", field="scope", value=given, repair=one_of(SCOPES, given))
    scopes: Any = scope or ["read", "submit"]
    with _keys() as keys:
        text, key = keys.create(tenant, scopes, name=name, lasts_s=None if days is None else days * DAY_S)
    print_json({"key": text, **_shown(key)}) if as_json else say(text)


@app.command("list")
def show(as_json: JsonOption = False) -> None:
    """Shows all keys, without their secrets."""
    with _keys() as keys:
        found = keys.all()
    if as_json:
        print_json({"keys": [{**_shown(key), "last_used_at": used} for key, used in found]})
        return
    if not found:
        say("no keys; `automap keys create --tenant NAME` makes one")
    for key, used in found:
        last = f"used {_day(used)}" if used else "never used"
        say(f"{key.id}  {key.tenant:16} {','.join(key.scopes):18} {_state(key):20} {last:16} {key.name}")


@app.command()
def revoke(
    key: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The id of the key: its characters between amk_ and the next _; `automap keys list` shows it.",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Revokes a key: from now on it is refused."""
    with _keys() as keys:
        found = keys.revoke(key)
    print_json(_shown(found)) if as_json else say(f"{found.id} of {found.tenant} is revoked")


@contextlib.contextmanager
def _keys() -> Iterator[Keys]:
    import redis

    from service.embedded_redis import reach
    from service.jobs.connection import check, connect
    from service.jobs.keys import Keys

    settings = read_settings()
    with contextlib.ExitStack() as stack:
        url = settings.redis_url or stack.enter_context(reach(settings.data_dir))
        client = stack.enter_context(connect(url))
        try:
            check(url)
            yield Keys(client)
        except redis.RedisError as fault:
            repair = "Start it, or set AUTOMAP_REDIS_URL or AUTOMAP_DATA_DIR as the service has them."
            raise UserError(
                f"the store does not answer ({fault})", field="redis_url", value="...", repair=repair
            ) from None


def _shown(key: Key) -> dict[str, Any]:
    document = to_json(key)
    del document["sha256"]
    return dict(document)


def _state(key: Key) -> str:
    if key.revoked_at is not None:
        return f"revoked {_day(key.revoked_at)}"
    if key.expires_at is None:
        return "usable"
    return f"{'expired' if key.expires_at <= time.time() else 'until'} {_day(key.expires_at)}"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
