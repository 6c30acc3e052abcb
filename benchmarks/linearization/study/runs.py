"""Train the study's variants: `python -m benchmarks.linearization.study.runs --base EXPORT --text TEXT`.

Every run is `job=linearize experiment=liger/study` with a variant's overrides (variants.py), several at once on one
GPU, since a small model leaves most of it idle. Each finished run appends to the CSV files of records.py; recorded runs
are skipped.
"""

import argparse
import concurrent.futures
import json
import logging
import math
import multiprocessing
import sys
import tempfile
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.linearization.study import variants
from benchmarks.linearization.study.records import CURVES, RUNS, TEACHER, UNIGRAM, Point, Result, Teacher
from benchmarks.measuring.configuration import compose
from benchmarks.measuring.records import append
from benchmarks.measuring.report import CommandLine, device_name
from benchmarks.measuring.tables import read_csv

QUIET = [
    f"callbacks.{name}=null"
    for name in ("progress", "machines", "checkpoints", "position_loss", "samples", "preemption", "watchdog")
]


def run(name: str, overrides: list[str], seed: int) -> dict[str, Any]:
    """Linearize and train one variant, and measure it on all the held-out text; runs in a separate process."""
    import lightning
    import torch
    from lightning.pytorch.callbacks import LambdaCallback

    from lit_modules.jobs import linearize
    from lit_modules.jobs.training_job import quieten_libraries
    from lit_modules.networks.linearized.conversion import with_softmax_layers

    warnings.filterwarnings("ignore")
    began = time.perf_counter()
    cfg = compose("experiment=liger/study", *QUIET, *overrides, f"seed={seed}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lightning.seed_everything(seed, verbose=False)
        quieten_libraries()
        trainer, module, data = linearize.build_and_check_base(cfg, folder)
        data.prepare()
        linearize.prepare_training(cfg, module, data, folder)
        if name == TEACHER:
            module.model = with_softmax_layers(module.model, range(module.model.config.num_hidden_layers))
        if name == variants.DRAWN:
            for parameter in (p for n, p in module.model.named_parameters() if "feature_map" in n):
                torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        points: dict[int, float] = {}

        def note(trainer: Any, module: Any) -> None:
            points[trainer.global_step * module.batch_tokens] = module.validation.loss

        curve = LambdaCallback(on_validation_end=note)
        trainer.callbacks.append(curve)
        if name in variants.UNTRAINED_VARIANTS:
            trainer.validate(module, datamodule=data, verbose=False)
        else:
            trainer.fit(module, datamodule=data)
            points[0] = module.before["student"]
        trainer.callbacks.remove(curve)
        trainer.limit_val_batches = 1.0
        trainer.validate(module, datamodule=data, verbose=False)
        found = module.validation
        bits = data.yardsticks()["unigram_bits_per_byte"]
        return {
            "name": name,
            "settings": json.dumps(
                [part for part in overrides if not part.startswith(("base=", "data.", "data_dir="))]
            ),
            "seed": seed,
            "tokens": trainer.global_step * module.batch_tokens,
            "nats": found.loss,
            "unigram": bits * math.log(2) * data.validation_bytes / found.tokens,
            "points": points,
            "new": sum(p.numel() for p in module.model.new_parameters().values()),
            "trained": sum(p.numel() for n, p in module.model.named_parameters() if n in module.trained),
            "kept": list(module.model.linearization.softmax_layers),
            "seconds": time.perf_counter() - began,
        }


def records(found: dict[str, Any], teacher: Teacher, commit: str, gpu: str) -> tuple[Result, list[Point]]:
    """Return a run's lines of the CSV files."""
    shared = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "teacher_parameters": teacher.parameters,
        "teacher_tokens": teacher.tokens,
        "variant": found["name"],
        "seed": found["seed"],
    }
    nats = found["nats"] if math.isfinite(found["nats"]) else math.nan
    result = Result(
        **shared,
        commit=commit,
        gpu=gpu,
        settings=found["settings"],
        adaptation_tokens=found["tokens"],
        held_out_nats=nats,
        perplexity=math.exp(min(nats, 700.0)),
    )
    return result, [
        Point(**shared, tokens=tokens, held_out_nats=loss) for tokens, loss in sorted(found["points"].items())
    ]


def wanted(arguments: argparse.Namespace) -> list[tuple[str, list[str], int]]:
    """Return (name, overrides, seed) of the requested runs."""
    chosen = {**variants.UNTRAINED_VARIANTS, **variants.PAPER, **variants.BEYOND, **variants.RECIPES}
    names = arguments.variants or list(chosen)
    unknown = [name for name in names if name not in chosen]
    if unknown:
        raise ValueError(f"--variants {unknown[0]} is not known: give some of {'; '.join(chosen)}")
    seeds = {name: [0] if name in variants.UNTRAINED_VARIANTS else arguments.seeds for name in names}
    return [(name, chosen[name], seed) for seed in arguments.seeds for name in names if seed in seeds[name]]


def main() -> int:
    """Make the missing runs; return the exit status."""
    parser = CommandLine(__doc__)
    parser.add_argument(
        "--base", type=Path, required=True, help="the teacher: an export of experiment=liger/teacher_28m"
    )
    parser.add_argument("--teacher-tokens", type=int, required=True, help="that the teacher was trained on")
    parser.add_argument("--text", type=Path, required=True, help="text files, of which the teacher held out the same")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--variants", nargs="*", help="names in variants.py; default: all")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=4, help="runs at once")
    parser.add_argument("--overrides", nargs="*", default=[], help="for every run")
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM

    from lit_modules.launching.run_folder import code_commit

    try:
        runs = wanted(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    logging.getLogger("lit_modules").setLevel(logging.WARNING)
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(arguments.base).parameters())
    teacher = Teacher(parameters=parameters, tokens=arguments.teacher_tokens)
    done = {(r.variant, r.seed) for r in read_csv(arguments.output / RUNS, Result) if r.teacher == teacher}
    shared = [f"base={arguments.base}", f"data.source.path={arguments.text}", f"data_dir={arguments.data_dir}"]
    shared += arguments.overrides
    began, failures = time.perf_counter(), 0
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        left = [each for each in runs if (each[0], each[2]) not in done]
        futures = {pool.submit(run, name, [*shared, *changes], seed): (name, seed) for name, changes, seed in left}
        for future in concurrent.futures.as_completed(futures):
            name, seed = futures[future]
            try:
                found = future.result()
            except Exception as error:  # continue with the others
                failures += 1
                print(f"{name}, seed {seed}: {type(error).__name__}: {error}", flush=True)
                continue
            result, points = records(found, teacher, code_commit() or "", device_name())
            append(arguments.output / CURVES, points)
            unigram = {**found, "name": UNIGRAM, "seed": 0, "tokens": 0, "nats": found["unigram"], "settings": "[]"}
            missing = (UNIGRAM, 0) not in done
            done |= {(name, seed), (UNIGRAM, 0)}
            yardstick, _ = records({**unigram, "points": {}}, teacher, code_commit() or "", device_name())
            append(arguments.output / RUNS, [*[yardstick] * missing, result])
            kept = f", softmax layers {found['kept']}" if found["kept"] else ""
            print(
                f"[{time.perf_counter() - began:4.0f} s] {name}, seed {seed}: {result.held_out_nats:.4f} nats a token "
                f"({found['seconds']:.0f} s; {found['new']} new parameters, {found['trained']} trained{kept})",
                flush=True,
            )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
