"""One run of ``kvtier quality``: model, text and codecs put together."""

from __future__ import annotations

from pathlib import Path

from kvtier.errors import CodecError, LayoutError
from kvtier.interfaces import BlockCodec
from kvtier_engine.device import device_name
from kvtier_engine.options import DeviceChoice
from kvtier_engine.quality.codecs import ALL, build_codecs, read_calibration, wanted_names
from kvtier_engine.quality.measure import Advance, Bench, Candidate
from kvtier_engine.quality.results import Mode, Report, Skipped
from kvtier_engine.quality.windows import cut_windows
from kvtier_engine.tokenizer import Tokenizer
from kvtier_engine.weights.load import kv_layout, load_model


class Study:
    """Everything checked and loaded, before anything is measured. float32 throughout."""

    def __init__(
        self,
        *,
        model: str,
        device: DeviceChoice,
        codec: str,
        text: str,
        mode: Mode,
        tokens: int,
        calibration: Path | None = None,
    ) -> None:
        """Load the model; blocks. Raises ``KVTierError`` for what cannot be measured."""
        names = wanted_names(codec)
        loaded = load_model(model, device=device_name(device), dtype="float32")
        self._windows = cut_windows(
            loaded.tokenizer.encode(text, add_special_tokens=False),
            _start_ids(loaded.tokenizer),
            mode=mode,
            tokens=tokens,
            context_tokens=loaded.config.context_tokens,
        )
        self._model = loaded.name
        self._mode = mode
        self._bench = Bench(loaded, self._windows, mode)
        known = None
        if calibration is not None:
            known = read_calibration(calibration, kv_layout(loaded.config, loaded.dtype))
        chosen, skipped = build_codecs(names, known, strict=codec.strip() != ALL)
        self._candidates, refused = self._prepared(chosen)
        self._skipped = (*skipped, *refused)

    @property
    def work_tokens(self) -> int:
        """Tokens that ``run`` feeds: what its ``advance`` sums up to."""
        return self._bench.work_tokens(len(self._candidates))

    def run(self, text_name: str, advance: Advance) -> Report:
        """Measure; blocks. ``advance`` hears of the tokens fed.

        Raises ``CodecError`` if no codec can carry the model's KV.
        """
        results, refused = self._bench.measure(self._candidates, advance)
        if not results:
            reasons = [f"{each.codec}: {each.reason}" for each in (*self._skipped, *refused)]
            raise CodecError(f"no codec can be measured: {'; '.join(reasons)}")
        return Report(
            model=self._model,
            text=text_name,
            mode=self._mode,
            windows=len(self._windows.token_ids),
            prefix_tokens=self._windows.prefix_tokens,
            continuation_tokens=self._windows.continuation_tokens,
            results=tuple(results),
            skipped=(*self._skipped, *refused),
        )

    def _prepared(self, chosen: list[BlockCodec]) -> tuple[list[Candidate], list[Skipped]]:
        """Make the codecs ready, the largest first, but for those that cannot carry this model."""
        ready: list[Candidate] = []
        refused: list[Skipped] = []
        for codec in chosen:
            try:
                ready.append(self._bench.prepare(codec))
            except (CodecError, LayoutError) as error:
                refused.append(Skipped(codec.name, str(error)))
        return sorted(ready, key=lambda each: -each.bits_per_value), refused


def _start_ids(tokenizer: Tokenizer) -> list[int]:
    """Return what the tokenizer puts before every text: a begin token, or nothing."""
    begin = tokenizer.bos_id
    return [begin] if begin is not None and tokenizer.encode("")[:1] == [begin] else []
