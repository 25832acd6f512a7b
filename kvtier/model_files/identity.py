"""The identity of a model in a folder: equal for every engine that loads it, on every machine."""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvtier.errors import ConfigError
from kvtier.keys import weights_id
from kvtier.model_files.cache import cache_folder, cached_folder, file_identity
from kvtier.model_files.folder import CONFIG_NAME, read_json, weight_files

#: As many as hide how long one core takes to sum what a disk can read.
_THREADS: Final = 4
_IDS_KEPT_MAX: Final = 256
_HEADER_BYTES_MAX: Final = 100_000_000
#: What a config says of itself and of how it is computed rather than of the model.
_ASIDE: Final = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
#: Names of dtypes in safetensors files that differ from those in keys.
_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}

_Row = tuple[str, str, tuple[int, ...], bytes]


def folder_weights_id(folder: Path) -> str:
    """Return the identity of a Hugging Face folder's model: all its tensors and its config.

    Reads every byte the first time, in four threads, and remembers the result for these very
    files where it can; other processes wait meanwhile. Raises ``ConfigError`` for what is no
    whole folder of safetensors.
    """
    paths = [folder / name for name in weight_files(folder)]
    config = folder / CONFIG_NAME
    try:
        name = file_identity([*paths, config], "weights id 2")
    except FileNotFoundError as error:
        raise ConfigError(f"{error.filename}: no such file") from error

    def build(made: Path) -> None:
        (made / "id").write_text(_identity(paths, config), encoding="ascii")

    try:
        with _alone():
            made = cached_folder("weights_ids", name, build, kept_max=_IDS_KEPT_MAX)
            return (made / "id").read_text(encoding="ascii")
    except OSError:
        return _identity(paths, config)


@contextmanager
def _alone() -> Iterator[None]:
    """Keep the ranks of one engine, which start together, from reading all weights each."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "weights_ids.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _identity(paths: list[Path], config: Path) -> str:
    values = {name: value for name, value in read_json(config).items() if name not in _ASIDE}
    told = json.dumps(values, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    rows: list[_Row] = [(config.name, "json", (), hashlib.sha256(told.encode()).digest())]
    for path in paths:
        rows += _tensors(path)
    return weights_id(rows)


def _tensors(path: Path) -> list[_Row]:
    """Return name, dtype, shape and digest of each tensor of a file."""
    if path.stat().st_size <= 8:
        raise ConfigError(f"{path}: not a whole safetensors file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        header_bytes = int.from_bytes(mapped[:8], "little")
        if not 2 <= header_bytes <= min(_HEADER_BYTES_MAX, len(mapped) - 8):
            raise ConfigError(f"{path}: not a whole safetensors file")
        start = 8 + header_bytes
        try:
            header = json.loads(mapped[8:start])
            named = [
                (name, _placed(entry, len(mapped) - start))
                for name, entry in header.items()
                if name != "__metadata__"
            ]
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(f"{path}: not a whole safetensors file: {error}") from error
        with memoryview(mapped) as data, ThreadPoolExecutor(_THREADS) as threads:

            def digest(part: tuple[int, int]) -> bytes:
                with data[start + part[0] : start + part[1]] as values:
                    return hashlib.sha256(values).digest()

            digests = list(threads.map(digest, (part for _, (_, _, part) in named)))
    return [
        (name, dtype, shape, found)
        for (name, (dtype, shape, _)), found in zip(named, digests, strict=True)
    ]


def _placed(entry: Any, data_bytes: int) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Return a tensor's dtype, shape and place behind the header. ``ValueError`` outside it."""
    first, last = map(int, entry["data_offsets"])
    if not 0 <= first <= last <= data_bytes:
        raise ValueError(f"a tensor lies at {first} .. {last} of {data_bytes} bytes")
    dtype = str(entry["dtype"])
    return _DTYPES.get(dtype, dtype), tuple(map(int, entry["shape"])), (first, last)
