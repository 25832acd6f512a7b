"""What is done with the objects of a running ``kvtier daemon``: ls, evict, invalidate, pin, warm.

Where prompts are given, ``warm`` and ``pin`` have a running ``kvtier-serve`` compute them, and
``unpin`` has it let them go.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.cache.tenancy.pins import check_pin_seconds
from kvtier.cli import warm as prompts
from kvtier.cli.control import (
    All,
    ApiKey,
    Credential,
    Json,
    Key,
    Keys,
    Server,
    TokenFile,
    TokenName,
    Url,
    selections,
    server_at,
)
from kvtier.config import format_size
from kvtier.errors import ConfigError, TierUnavailableError

_COLUMNS: Final = ("credential", "epoch", "dram", "disk", "pinned", "quota")
_PIN_COLUMNS: Final = ("credential", "for", "objects", "dram", "disk")
#: What those commands take, too, that prompts of kvtier-serve can be given to.
_PROMPTS_TOO: Final = "; for prompts of kvtier-serve: --file"

_MaybeUrl = Annotated[
    str | None,
    typer.Argument(metavar="[URL]", help="A server: kvtier daemon's --http, or kvtier-serve."),
]
_UrlOption = Annotated[str | None, typer.Option("--url", help="The same, as an option.")]
_Prompts = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help='For kvtier-serve: prompts, one JSON object a line: {"prompt": …} or {"messages": …}.',
    ),
]
_Salt = Annotated[
    Path | None,
    typer.Option(help="File with the cache_salt of all prompts; - reads it from stdin."),
]
_Tiers = Annotated[
    list[str] | None, typer.Option("--tier", help="dram or disk, repeatable; default: both.")
]


def ls(
    url: Url,
    token_file: TokenFile = None,
    token_name: TokenName = None,
    api_key: ApiKey = "",
    json_output: Json = False,  # noqa: FBT002
) -> None:
    """List what lies in a cache server, by credential and epoch."""
    told = server_at(url, token_file, token_name, api_key).ask("GET", "/v1/namespaces")
    _show(url, told, lambda: _table(told["namespaces"]), json_output=json_output)


def pins(
    url: Url,
    token_file: TokenFile = None,
    token_name: TokenName = None,
    api_key: ApiKey = "",
    json_output: Json = False,  # noqa: FBT002
) -> None:
    """List what is pinned in kvtier daemon or kvtier-serve, and for how much longer."""
    server = server_at(url, token_file, token_name, api_key)
    told = server.ask("GET", "/v1/pin", or_at="/v1/kvtier/pins")
    _show(url, told, lambda: _pin_table(told["pins"]), json_output=json_output)


def evict(
    url: Url,
    key: Key = None,
    keys: Keys = None,
    everything: All = False,  # noqa: FBT002
    credential: Credential = None,
    tier: _Tiers = None,
    token_file: TokenFile = None,
    token_name: TokenName = None,
    api_key: ApiKey = "",
    json_output: Json = False,  # noqa: FBT002
) -> None:
    """Let objects leave DRAM and disk as if they made room; exit status 1 where some are in use."""
    tiers = tier or ["dram", "disk"]
    if not set(tiers) <= {"dram", "disk"}:
        raise ConfigError(f"--tier = {tier}: allowed are dram and disk")
    server = server_at(url, token_file, token_name, api_key)
    chosen = selections(credential, key, keys, everything=everything)
    told = _ask_all(server, "evict", chosen, {"tiers": tiers})
    _tell(told, json_output=json_output, wrong={"busy"})


def invalidate(
    url: Url,
    key: Key = None,
    keys: Keys = None,
    everything: All = False,  # noqa: FBT002
    credential: Credential = None,
    token_file: TokenFile = None,
    token_name: TokenName = None,
    api_key: ApiKey = "",
    json_output: Json = False,  # noqa: FBT002
) -> None:
    """Have objects never found again, in any tier or remote; exit status 1 where some are in use.

    With --all it is a new epoch: at once, whatever there is, and for good.
    """
    server = server_at(url, token_file, token_name, api_key)
    chosen = selections(credential, key, keys, everything=everything)
    _tell(_ask_all(server, "invalidate", chosen, {}), json_output=json_output, wrong={"busy"})


def unpin(
    where: _MaybeUrl = None,
    url: _UrlOption = None,
    file: _Prompts = None,
    salt_file: _Salt = None,
    key: Key = None,
    keys: Keys = None,
    everything: All = False,  # noqa: FBT002
    credential: Credential = None,
    token_file: TokenFile = None,
    token_name: TokenName = None,
    api_key: ApiKey = "",
    json_output: Json = False,  # noqa: FBT002
) -> None:
    """Let what is pinned leave when its turn comes: objects of kvtier daemon, or prompts."""
    target = _one(where, url)
    server = server_at(target, token_file, token_name, api_key)
    chosen = _objects(file, credential, key, keys, everything=everything)
    if file is not None:
        prompts.unpin(target, file, salt_file, server.token, json_output=json_output)
    else:
        _tell(_ask_all(server, "unpin", chosen, {}), json_output=json_output)


def warm(
    where: _MaybeUrl = None,
    url: _UrlOption = None,
    file: _Prompts = None,
    salt_file: _Salt = None,
    key: Key = None,
    keys: Keys = None,
    everything: All = False,  # noqa: FBT002
    credential: Credential = None,
    seconds: Annotated[float, typer.Option(help="How long kvtier daemon may take.")] = 30.0,
    token_file: TokenFile = None,
    token_name: TokenName = None,
    api_key: ApiKey = "",
    json_output: Json = False,  # noqa: FBT002
) -> None:
    """Have kvtier daemon bring objects up into memory, or kvtier-serve compute and store prompts.

    Exit status 1 where objects did not come up for want of room or time.
    """
    target = _one(where, url)
    server = server_at(target, token_file, token_name, api_key)
    chosen = _objects(file, credential, key, keys, everything=everything)
    if file is not None:
        prompts.warm(target, file, salt_file, server.token, json_output=json_output)
    else:
        told = _ask_all(server, "warm", chosen, {"seconds": seconds})
        _tell(told, json_output=json_output, wrong={"refused", "late"})


def pin(
    seconds: Annotated[float, typer.Option(help="How long they are to stay.")],
    where: _MaybeUrl = None,
    url: _UrlOption = None,
    file: _Prompts = None,
    salt_file: _Salt = None,
    key: Key = None,
    keys: Keys = None,
    everything: All = False,  # noqa: FBT002
    credential: Credential = None,
    token_file: TokenFile = None,
    token_name: TokenName = None,
    api_key: ApiKey = "",
    json_output: Json = False,  # noqa: FBT002
) -> None:
    """Keep objects of kvtier daemon from eviction, or prompts of kvtier-serve, computed and stored.

    Exit status 1 unless all of it is pinned.
    """
    check_pin_seconds("--seconds", seconds)
    target = _one(where, url)
    server = server_at(target, token_file, token_name, api_key)
    chosen = _objects(file, credential, key, keys, everything=everything)
    if file is not None:
        prompts.pin(target, file, seconds, salt_file, server.token, json_output=json_output)
    else:
        told = _ask_all(server, "pin", chosen, {"seconds": seconds})
        _tell(told, json_output=json_output, wrong={"absent", "no_room"})


def _one(where: str | None, url: str | None) -> str:
    if (where is None) == (url is None):
        raise ConfigError("URL: allowed is one, as an argument or with --url")
    return where or url or ""


def _objects(
    prompts_file: Path | None,
    credential: str | None,
    key: list[str] | None,
    keys: Path | None,
    *,
    everything: bool,
) -> Iterable[dict[str, Any]]:
    """Return the objects that are meant, none where prompts are. Raises ``ConfigError``."""
    if prompts_file is None:
        return selections(credential, key, keys, everything=everything, also=_PROMPTS_TOO)
    if key or keys is not None or credential is not None or everything:
        raise ConfigError("--file has prompts, for kvtier-serve; objects are of kvtier daemon")
    return ()


def _ask_all(
    server: Server, what: str, chosen: Iterable[dict[str, Any]], more: dict[str, Any]
) -> dict[str, Any]:
    """Ask for one thing as often as it takes; return the sums of what is answered."""
    sums: Counter[str] = Counter()
    said: dict[str, Any] = {}
    for objects in chosen:
        said = server.ask("POST", f"/v1/{what}", {"objects": objects, **more})
        sums.update({name: count for name, count in said.items() if type(count) is int})
    if "credential" not in said:
        raise _strange(server.url)
    return {"credential": said["credential"], **sums}


def _tell(told: dict[str, Any], *, json_output: bool, wrong: Collection[str] = ()) -> None:
    if json_output:
        typer.echo(json.dumps(told))
    else:
        counts = [
            f"{name.replace('_', ' ')} {n}" for name, n in told.items() if name != "credential"
        ]
        typer.echo(f"{told['credential']}: {', '.join(counts)}")
    if any(told.get(name) for name in wrong):
        raise typer.Exit(1)


def _show(url: str, told: dict[str, Any], table: Callable[[], Table], *, json_output: bool) -> None:
    if json_output:
        typer.echo(json.dumps(told, indent=2))
        return
    try:
        made = table()
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise _strange(url) from error
    Console().print(made)


def _pin_table(pins: list[dict[str, Any]]) -> Table:
    table = Table(*_PIN_COLUMNS, box=None, padding=(0, 1, 0, 0))
    for each in pins:
        name = each.get("credential") or f"({each['tenant'][:12]})"
        sizes = [format_size(each[f"{tier}_bytes"]) for tier in ("dram", "disk")]
        table.add_row(*map(Text, (name, f"{each['seconds']} s", f"{each['objects']}", *sizes)))
    return table


def _table(namespaces: list[dict[str, Any]]) -> Table:
    table = Table(*_COLUMNS, box=None, padding=(0, 1, 0, 0))
    for each in namespaces:
        name = each["credential"] or f"({each['tenant'][:12]})"
        epoch = f"{each['epoch']}" if each["current"] else f"{each['epoch']} (past)"
        sizes = [format_size(each[f"{tier}_bytes"]) for tier in ("dram", "disk", "pinned")]
        quota = format_size(each["quota_bytes"]) if each["quota_bytes"] else ""
        table.add_row(*map(Text, (name, epoch, *sizes, quota)))
    return table


def _strange(url: str) -> TierUnavailableError:
    return TierUnavailableError(f"{url}: the answer is not one of a cache server")
