"""`exl3.convert`: a Hugging Face model directory becomes an EXL3 one (quantizer description, sections 2 and 15)."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3 import ops
from exl3.errors import ArgumentError, JobError, MissingTensorError, NumericalError, ResourceError, UnsupportedError
from exl3.files import Checkpoint, Tokenizer
from exl3.files.config import check_target
from exl3.files.shards import make_output, write_atomic
from exl3.models.loading import load, locate
from exl3.models.registry import build
from exl3.quantize import calibration as cal
from exl3.quantize import selfgen, sensitivity
from exl3.quantize.background import Reader, Writer
from exl3.quantize.block import Policy, quantize_block
from exl3.quantize.compile import config_block, write_model
from exl3.quantize.devices import choose_devices, read_ratios
from exl3.quantize.embedding import quantize_embedding
from exl3.quantize.head import quantize_head
from exl3.quantize.hessian import check_weights
from exl3.quantize.job import Job, changed_settings, check_streams, fingerprint, stream_tensors
from exl3.quantize.linear import EncodeAt, Settings
from exl3.quantize.options import CHANGEABLE, MOMENTARY, ConvertOptions
from exl3.quantize.plan import Plan, check_resources, make_plan, stream_room
from exl3.quantize.recipe import format_recipe
from exl3.quantize.report import BlockReport, Report
from exl3.quantize.streams import Shard, Streams, shard_rows
from exl3.quantize.team import Team, Worker
from exl3.quantize.tune import LEAST_ROWS, TuneSettings, tune

HEAD_WINDOW, HEAD_WINDOW_BITS = 64, 5  # of a head with so many bits on a CPU: less than 1 % more of an error that hardly counts
BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}  # tokens in one forward pass of a block

# (weights done, weights in all, what is being worked on)
Progress = Callable[[int, int, str], None]


def convert(
    input_dir: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    bits: float | None = None,
    *,
    work_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    log: Callable[[str], None] | None = None,
    **options: Any,
) -> Report:
    """Quantizes the model in `input_dir` to EXL3 at `bits` per weight (decoder matrices, head apart) and writes it to `output_dir`.

    work_dir    checkpoints, default `output_dir` + ".work"; with `resume=True` all else is taken from there
    progress    told (weights done, weights in all, name) as the work goes on
    log         takes lines for people
    options     see `exl3.quantize.options.ConvertOptions`

    Raises an `Exl3Error` with what, where and what to do; after an interruption the work folder can be resumed and gives the same bytes.
    """
    given = {k: v for k, v in (("bits", bits), ("input_dir", input_dir), ("output_dir", output_dir)) if v is not None}
    given |= {"input_dir": os.fspath(input_dir)} if input_dir is not None else {}
    given |= {"output_dir": os.fspath(output_dir)} if output_dir is not None else {}
    known = {f.name for f in dataclasses.fields(ConvertOptions)}
    for name in options:
        if name not in known:
            raise ArgumentError(f"convert has no option {name!r}; it has {', '.join(sorted(known))}")
    given |= {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in options.items()}
    if given.get("devices") is not None:
        given["devices"] = str(given["devices"])  # a torch.device or a number will do
    if work_dir is None:
        if output_dir is None:
            raise ArgumentError("no output_dir (-o); a resumed job may be named by its work_dir (-w) alone")
        work_dir = os.fspath(output_dir).rstrip("/\\") + ".work"
    return _Conversion(Path(work_dir), given, progress, log or (lambda line: None)).run()


class _Conversion:
    """The state of one call of `convert`."""

    def __init__(self, work: Path, given: dict[str, Any], progress: Progress | None, log: Callable[[str], None]) -> None:
        self.work, self.given, self.log = work, given, log
        self.progress = progress
        self.lock = threading.Lock()  # of the progress, which several devices make
        self.done_weights = 0
        self.total_weights = 0
        self.current = ""
        self.warnings: list[str] = []
        self.begun = False  # there is something to resume
        self.writer: Writer  # of finished modules

    def run(self) -> Report:
        resume = bool(self.given.get("resume"))
        if not resume:
            ConvertOptions(**self._own(self.given)).checked()  # a wrong option is told before anything is created
            self._paths()
        existed = self.work.exists()
        output = Path(self.given.get("output_dir") or self.work)
        made = not output.exists()
        with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with Job(self.work) as job:
                    report = self._within_memory(job, resume)
            except BaseException:
                self._tell(caught)
                if self.begun:
                    self.log(f"not finished; go on with: exl3 convert -w {self.work} --resume")
                if not existed and self.work.is_dir() and not (self.work / "job.json").exists():  # nothing was begun: leave no trace
                    (self.work / "lock").unlink(missing_ok=True)
                    if not any(self.work.iterdir()):
                        self.work.rmdir()
                if made and not self.begun:
                    with suppress(OSError):  # something is in it
                        output.rmdir()
                raise
            report.warnings = self._tell(caught)
        return report

    def _within_memory(self, job: Job, resume: bool) -> Report:
        try:
            return self._run(job, resume)
        except torch.OutOfMemoryError as e:
            raise ResourceError(
                f"{self.current}: not enough memory on the device, even with the smallest batches and the rest in host memory "
                f"({str(e).splitlines()[0]}); free it of other work, or use -d cpu"
            ) from e

    def _tell(self, caught: list[warnings.WarningMessage]) -> list[str]:
        lines = list(dict.fromkeys([*self.warnings, *(str(w.message) for w in caught)]))
        for line in lines:
            self.log(f"warning: {line}")
        return lines

    @staticmethod
    def _own(given: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in given.items() if k not in ("input_dir", "output_dir")}

    def _paths(self) -> tuple[Path, Path]:
        for name, flag in (("input_dir", "-i"), ("output_dir", "-o")):
            if not self.given.get(name):
                raise ArgumentError(f"no {name} ({flag})")
        source, output = Path(self.given["input_dir"]), Path(self.given["output_dir"])
        if not source.is_dir():
            raise ArgumentError(f"input_dir {source}: no such directory")
        if len({source.resolve(), output.resolve(), self.work.resolve()}) < 3:
            raise ArgumentError(f"source {source}, output_dir {output} and work folder {self.work} must be three folders; choose another")
        for name, folder in (("output_dir", output), ("work folder", self.work)):
            if folder.exists() and not folder.is_dir():
                raise ArgumentError(f"{name} {folder} is a file; give a directory, there or yet to be made")
        check_target(output)
        return source, output

    # set-up

    def _run(self, job: Job, resume: bool) -> Report:
        started = time.monotonic()
        stored = job.stored()
        if stored is not None and not resume:
            raise JobError(f"{self.work}: holds an unfinished conversion; go on with --resume, or remove the folder")
        if resume and stored is None:
            if "input_dir" not in self.given:
                raise JobError(f"{self.work}: holds no unfinished conversion, nothing to resume; begin one with -i, -o and -b")
            self.warnings.append(f"{self.work}: nothing to resume, starting anew")
            resume = False
        self.begun = stored is not None
        options = self._options(stored)
        source_dir, output_dir = self._paths()
        devices = choose_devices(options.devices)
        read_ratios(options.device_ratios, len(devices))
        device = devices[0]
        options = options.with_calibration(device.type)
        source = Checkpoint.open(source_dir)
        if source.is_exl3:
            raise UnsupportedError(f"{source_dir}: is an EXL3 model already; give the unquantized model")
        model = build(source.config)
        found = locate(model, source)
        self._note_unused(model, source, found.used)
        plan = make_plan(model, source, options, found.used)
        options = options.with_sides(device.type, max((s.out_padded for s in plan.specs), default=0))
        model.place(device)
        check_resources(plan, model, options, devices, self.work, output_dir, resuming=resume)
        mark = fingerprint(source_dir)
        if stored is not None:
            rows = self._go_on(job, stored, plan, options, mark, output_dir)
        else:
            rows = self._begin(job, model, source, plan, options, mark, output_dir, device)
        self.log(
            f"{type(model).__name__}, {len(plan.specs)} matrices in {len(model.blocks)} blocks, {plan.bits:.2f} bits per weight, "
            f"head {plan.head_bits:g}, codebook {options.codebook}, on {', '.join(map(str, devices))}"
        )
        if options.hq and not any(s.hq_bits for s in plan.specs):
            self.log("-hq names no layer of this architecture (it concerns mixture-of-experts models)")
        self.log(f"calibration: {rows.describe()}")
        self._loop(job, model, source, plan, options, rows, devices)
        tuned = self._tune(job, model, source, plan, options, rows, device)
        return self._finish(job, model, source, plan, options, rows, output_dir, started, tuned)

    def _go_on(self, job: Job, stored: dict[str, Any], plan: Plan, options: ConvertOptions, mark: str, output: Path) -> cal.Calibration:
        """The rows of an unfinished job, its rates into `plan`; JobError where it cannot go on as it was begun."""
        if stored["fingerprint"] != mark:
            raise JobError(
                f"{self.given['input_dir']}: is not the model this job was begun with (config.json or weights have changed, or it is "
                f"another than {stored['options']['input_dir']}); restore it or start anew"
            )
        rates = {k: float(v) for k, v in stored["rates"].items()}
        if options.allocation == "sensitivity" and options.recipe is None and rates.keys() == plan.rates.keys():
            plan.rates = rates  # measured once
        if rates != plan.rates:
            raise JobError(f"{self.work}: the rates of the stored job cannot be derived any more (was the recipe edited?); start anew")
        rows = cal.Calibration(job.calibration(), stored["calibration"])
        make_output(output)
        job.update(options=self._as_stored(options))
        return rows

    def _begin(
        self, job: Job, model: Any, source: Checkpoint, plan: Plan, options: ConvertOptions, mark: str, output: Path, device: torch.device
    ) -> cal.Calibration:
        """The rows of a new job; what is measured of the original model into `plan` and the work folder."""
        tokenizer = self._tokenizer(source)
        rows = self._calibration(options, tokenizer, model.config.vocab_size)
        model.config.warn_beyond_context(rows.cols, "--cal-cols")
        if options.tune and rows.rows < LEAST_ROWS:
            raise ArgumentError(f"tune needs at least {LEAST_ROWS} calibration rows, one to judge by; there are {rows.rows}")
        make_output(output)
        job.clean()
        if options.self_text and tokenizer is None:
            self.warnings.append("self_text needs a tokenizer, and the model has none: it writes no calibration rows")
        elif options.self_text:
            rows = self._self_text(source, tokenizer, options, rows, device)
        self._weigh(job, model, source, plan, options, rows, device)
        job.begin({"options": self._as_stored(options), "fingerprint": mark, "rates": plan.rates, "calibration": rows.sources}, rows.ids)
        self.begun = True
        return rows

    def _options(self, stored: dict[str, Any] | None) -> ConvertOptions:
        """Given options over stored ones; JobError where a resumed job would change."""
        if stored is not None:
            old = stored["options"]
            asked = _absolute({k: v for k, v in self.given.items() if k != "resume"})
            wrong = {k: v for k, v in changed_settings(old, asked).items() if k not in CHANGEABLE}
            if wrong:
                name, (was, now) = next(iter(wrong.items()))
                raise JobError(
                    f"{self.work}: this job was begun with {name}={was}, not {now}; leave the option out, or start anew in another folder"
                )
            self.given = {k: v for k, v in old.items() if k not in MOMENTARY} | asked
        return ConvertOptions(**self._own(self.given)).checked()

    def _as_stored(self, options: ConvertOptions) -> dict[str, Any]:
        own = dataclasses.asdict(options) | {"resume": False}
        return _absolute(own | {name: self.given[name] for name in ("input_dir", "output_dir")})

    def _note_unused(self, model: Any, source: Checkpoint, used: set[str]) -> None:
        unused = [n for n in source.unused(used) if not (model.other_parts and n.startswith(model.other_parts))]
        if unused:
            self.warnings.append(
                f"{len(unused)} tensors of the source are not used by {type(model).__name__} and are left out: {', '.join(unused[:8])}"
            )

    def _tokenizer(self, source: Checkpoint) -> Any:
        try:
            return Tokenizer.from_directory(source.path)
        except MissingTensorError:
            return None

    def _calibration(self, options: ConvertOptions, tokenizer: Any, vocab: int) -> cal.Calibration:
        assert options.cal_rows is not None and options.cal_cols is not None
        if options.cal_data:
            asked = self.given.get("cal_rows") is not None
            return cal.from_file(options.cal_data, options.cal_rows, options.cal_cols, vocab, tokenizer, all_rows=asked)
        return cal.bundled(tokenizer, options.cal_rows, options.cal_cols, vocab, options.seed)

    def _self_text(
        self, source: Checkpoint, tokenizer: Any, options: ConvertOptions, rows: cal.Calibration, device: torch.device
    ) -> cal.Calibration:
        """Part of the rows replaced by what the model writes itself."""
        assert options.self_text is not None
        count = round(options.self_text * rows.rows)
        if count == 0:
            return rows
        self.log(f"the model writes {count} calibration rows")
        model = load(source.path, device, max_tokens=selfgen.PIECE)
        eos = set(source.eos_ids(tokenizer))
        ids = selfgen.calibration_rows(model, tokenizer, eos, count, rows.cols, options.seed)
        model.unload()
        sources = {name: n * (rows.rows - count) // rows.rows for name, n in rows.sources.items()}
        return cal.Calibration(torch.cat([rows.ids[count:], ids]), sources | {"self-written": count})

    def _weigh(
        self, job: Job, model: Any, source: Checkpoint, plan: Plan, options: ConvertOptions, rows: cal.Calibration, device: torch.device
    ) -> None:
        """Rates by measured sensitivity; the importance of the outputs of each matrix into the work folder."""
        if not options.wants_sensitivity:
            return
        assert options.damping is not None

        def finished(index: int, found: dict[str, sensitivity.Sensitivity]) -> None:
            kept = {f"{key}.channels": s.channels for key, s in found.items() if options.channel_weighting}
            job.save_importance(index, kept | {f"{key}.output": s.output for key, s in found.items() if s.output is not None})

        tokens = sensitivity.affordable(options.sensitivity_tokens(device.type), model, device)
        ids = sensitivity.rows_for(rows.ids, tokens, 256 if device.type == "cpu" else 512)
        self.log(f"measuring sensitivity on {ids.numel()} tokens")
        outputs = bool(options.two_sided)
        try:
            found = sensitivity.measure(
                model, source, ids, device, damping=options.damping, seed=options.seed, outputs=outputs, finished=finished
            )
        except sensitivity.NotFinite:  # the conversion itself will name the place, or do without half precision
            self.warnings.append("sensitivity could not be measured: activations or gradients are not finite; bits are spread by place")
            job.clean()
            return
        if plan.budget is not None and options.allocation == "sensitivity":
            plan.spend(found, options)

    # the work

    def _loop(
        self,
        job: Job,
        model: Any,
        source: Checkpoint,
        plan: Plan,
        options: ConvertOptions,
        rows: cal.Calibration,
        devices: list[torch.device],
    ) -> None:
        weights = [sum(s.weights for s in plan.specs if s.layer == b.layer and plan.rates[s.key] != 16) for b in model.blocks]
        weights.append(plan.head.weights if plan.head_bits != 16 else 0)
        self.total_weights = sum(weights) + (plan.ring_weights if plan.embed_bits != 16 else 0)
        encode = _encoder(options.codebook)
        done, streams = job.state()
        if not streams:
            done, streams = 0, self._embed(job, model, source, plan, options, rows, devices[0])
        else:
            check_streams(streams, (rows.rows, rows.cols, model.config.hidden_size), job.folder / "state.safetensors")
            job.check_modules([*range(done), *([len(model.blocks) + 1] if plan.embed_bits != 16 else [])])
            self.done_weights = sum(weights[:done]) + (plan.ring_weights if plan.embed_bits != 16 else 0)
            self.log(f"resuming behind block {done}")
        with Writer() as self.writer, self._team(model, source, plan, options, streams, devices) as team:
            streams.clear()
            team.set_speeds(read_ratios(options.device_ratios, len(devices)), encode)
            self._blocks(job, done, plan, options, team, encode)
            self._head(job, source, plan, options, team, encode)

    def _team(
        self, model: Any, source: Checkpoint, plan: Plan, options: ConvertOptions, streams: dict[str, Tensor], devices: list[torch.device]
    ) -> Team:
        """A worker for each device, with its shards of the streams."""
        rows_per_batch = max(1, BATCH_TOKENS.get(devices[0].type, 16384) // streams["quantized"].shape[1])
        workers = []
        for i, device in enumerate(devices):
            own = model
            if i > 0:
                own = build(source.config)
                locate(own, source)
                own.place(device)
            reader = Reader(partial(own.load_block, checkpoint=source, device=device), device)
            workers.append(Worker(device, own, Streams(own, device, rows_per_batch, stream_room(plan, own, device)), reader))
        team = Team(workers)
        original = streams.get("original")
        team.spread(
            [
                Shard(a, streams["quantized"][a:b], None if original is None else original[a:b])
                for a, b in shard_rows(streams["quantized"].shape[0], rows_per_batch)
            ]
        )
        return team

    def _blocks(self, job: Job, done: int, plan: Plan, options: ConvertOptions, team: Team, encode: EncodeAt) -> None:
        blocks, policy = team.lead.model.blocks, _policy(options)
        for i in range(done, len(blocks)):
            self.current = blocks[i].key
            more = i + 1 < len(blocks) and options.max_module != i
            own = dataclasses.replace(policy, importance=job.importance(i))
            result = quantize_block(i, team, plan.rates, own, encode, self._step, ahead=i + 1 if more else None)
            for w in team.workers:
                w.model.unload_block(i)
            self._save(job, i, result.tensors, result.reports, result.block, options)
            stop = options.max_module is not None and i >= options.max_module
            if stop or (job.due(options.checkpoint_interval) and not 0 <= options.last_checkpoint_index < i):
                self.writer.flush()
                job.save_state(i + 1, stream_tensors(team.shards()))
            if stop:
                raise JobError(f"stopped behind block {i} as asked (--max-module); go on with --resume")

    def _embed(
        self, job: Job, model: Any, source: Checkpoint, plan: Plan, options: ConvertOptions, rows: cal.Calibration, device: torch.device
    ) -> dict[str, Tensor]:
        """The streams behind the embedding; a ring-quantized table is made here."""
        from exl3.cache import Batch

        self.current = model.embed_key
        model.load_embed(source, torch.device("cpu"))
        table = model.model.embed_tokens
        check_weights(table.weight.data, model.embed_key)
        ids = rows.ids
        original = self._look_up(model, Batch, ids)
        quantized = original
        if plan.embed_bits != 16:
            encode = lambda tiles: ops.encode(tiles, plan.embed_bits, "mul1", seam_window=options.seam_window or 0)  # noqa: E731
            tensors, decoded = quantize_embedding(model.embed_key, table.weight.data.to(device), plan.embed_bits, encode, self._step)
            job.save_module(len(model.blocks) + 1, tensors, {"tensors": [], "block": None})
            table.set_dense(decoded)
            quantized = self._look_up(model, Batch, ids)
        table.unload()
        streams = {"quantized": quantized}
        if options.correction:
            streams["original"] = original.clone() if original is quantized else original
        return streams

    @staticmethod
    def _look_up(model: Any, batch_class: Any, ids: Tensor) -> Tensor:
        device = model.device
        model.device = torch.device("cpu")
        try:
            x: Tensor = model.embed(batch_class.whole(ids)).float()
        finally:
            model.device = device
        return x.view(ids.shape[0], ids.shape[1], -1)

    def _head(self, job: Job, source: Checkpoint, plan: Plan, options: ConvertOptions, team: Team, encode: EncodeAt) -> None:
        started = time.monotonic()
        model = team.lead.model
        self.current = model.head_key
        model.load_head(source, team.lead.device)
        tensors: dict[str, Tensor] = {}
        reports = []
        if plan.head_bits == 16 and plan.embed_bits == 16 and source.head(model.head_key, model.embed_key).tied:
            self.log("the head stays tied to the embedding")
        elif plan.head_bits == 16:
            tensors[f"{model.head_key}.weight"] = model.lm_head.weight.data.half()
        else:
            settings, scales = _policy(options).settings, options.out_scales != "never"
            if team.lead.device.type == "cpu" and plan.head_bits >= HEAD_WINDOW_BITS:
                settings.seam_window = min(settings.seam_window, HEAD_WINDOW)
            tensors, report = quantize_head(
                team, source, plan.head_bits, scales, settings, encode, self._step, correction=options.correction or 0.0
            )
            reports = [report]
        model.model.norm.unload()
        model.lm_head.unload()
        block = BlockReport(model.head_key, 0.0, 0.0, time.monotonic() - started)
        self._save(job, len(model.blocks), tensors, reports, block, options)

    def _tune(
        self, job: Job, model: Any, source: Checkpoint, plan: Plan, options: ConvertOptions, rows: cal.Calibration, device: torch.device
    ) -> dict[str, Tensor]:
        """Trained scales, biases and norms that replace what was written; empty without --tune."""
        if not options.tune:
            return {}
        self.current = "tuning"
        embedding = job.module(len(model.blocks) + 1) if plan.embed_bits != 16 else None
        steps = options.tune_steps or TuneSettings.steps
        try:
            tuned = tune(source, job.module, rows.ids, device, TuneSettings(steps=steps, seed=options.seed), embedding=embedding)
        except torch.OutOfMemoryError as e:  # hours of work are not held back for it
            self.warnings.append(f"tuning: not enough memory on {device} ({str(e).splitlines()[0]}); the scales stay as they were")
            return {}
        except NumericalError as e:
            self.warnings.append(f"{e}; the scales stay as they were")
            return {}
        self.log(f"tuning: mean KL on held-out rows {tuned.before:.5f} before, {tuned.after:.5f} after {steps} steps")
        if not tuned.tensors:
            self.warnings.append("tuning did not lower the divergence on held-out rows; the scales stay as they were")
        return tuned.tensors

    def _save(
        self, job: Job, index: int, tensors: dict[str, Tensor], reports: list[Any], block: BlockReport, options: ConvertOptions
    ) -> None:
        record = {"tensors": [dataclasses.asdict(r) for r in reports], "block": dataclasses.asdict(block)}
        self.writer.submit(lambda: job.save_module(index, {name: t.cpu().contiguous() for name, t in tensors.items()}, record))
        if options.verbose:
            for r in reports:
                flags = ("o" if r.out_scales else ".") + ("." if r.calibrated else "f") + ("s" if r.scale_searched else ".")
                self.log(f"  {r.key}  {r.bits:g} bits  proxy error {r.proxy_error:.6f}  {flags}  g {r.scale:.3f}  {r.seconds:.1f} s")
        errors = [r.proxy_error for r in reports]
        mean = f"proxy error {sum(errors) / len(errors):.6f}  " if errors else ""
        rfn = f"output error {block.rfn:.5f}  " if block.rfn else ""
        self.log(f"{block.key}  {mean}{rfn}{block.seconds:.1f} s")

    def _step(self, weights: int) -> None:
        with self.lock:
            self.done_weights += weights
            if self.progress is not None:
                self.progress(min(self.done_weights, self.total_weights), self.total_weights, self.current)

    def _finish(
        self,
        job: Job,
        model: Any,
        source: Checkpoint,
        plan: Plan,
        options: ConvertOptions,
        rows: cal.Calibration,
        output: Path,
        started: float,
        tuned: dict[str, Tensor],
    ) -> Report:
        report = Report(str(output), plan.bits, plan.head_bits)
        for i in range(len(model.blocks) + 1):
            record = job.record(i)
            report.tensors += Report.tensors_from(record["tensors"])
            report.blocks += Report.blocks_from([record["block"]])
        report.calibration = {"rows": rows.rows, "cols": rows.cols, "sources": rows.sources}
        embedding = job.module(len(model.blocks) + 1) if plan.embed_bits != 16 else None
        block = config_block(
            source,
            bits=plan.bits,
            head_bits=plan.head_bits,
            codebook=options.codebook,
            calibration=report.calibration,
            out_scales=options.out_scales,
        )
        result = write_model(model, source, output, job.module, block, shard_size=options.shard_size, embedding=embedding, replaced=tuned)
        report.bytes = sum(t.nbytes for t in result.tensors.values())
        report.total_bits = 8 * report.bytes / plan.total_weights
        report.seconds = time.monotonic() - started
        numbers = {"achieved_bpw": round(plan.bits, 4), "head_bits": plan.head_bits, "embed_bits": plan.embed_bits}
        recipe = format_recipe({s.key: plan.rates[s.key] for s in plan.specs}, numbers)
        write_atomic(self.work / "recipe.yaml", recipe)
        report.write(self.work / "report.json")
        job.finish()
        return report


def _absolute(options: dict[str, Any]) -> dict[str, Any]:
    """With whole paths: a job may be resumed from another folder."""
    paths = ("input_dir", "output_dir", "recipe", "cal_data")
    return {k: os.path.abspath(v) if k in paths and isinstance(v, str) else v for k, v in options.items()}


def _encoder(codebook: str) -> EncodeAt:
    def encode(tiles: Tensor, rate: float, seam_window: int) -> tuple[Tensor, Tensor]:
        return ops.encode(tiles, rate, codebook, seam_window=seam_window)

    return encode


def _policy(o: ConvertOptions) -> Policy:
    assert o.damping is not None and o.scaled_hessian is not None and o.seam_window is not None
    settings = Settings(
        codebook=o.codebook,
        damping=o.damping,
        choose_damping=bool(o.choose_damping),
        scaled_hessian=o.scaled_hessian,
        seam_window=o.seam_window,
        search_scale=o.preset == "incumbent" or o.quality == "best",
        seed=o.seed,
    )
    return Policy(settings, o.out_scales, bool(o.recapture), float(o.correction or 0), bool(o.token_weighting))
