"""Data module of several components: weights by phase, epoch caps, exact proportions in a resumable order."""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from torch.utils.data import Sampler

from common.atomic_files import write_atomic
from common.settings import NO_VALUE, SettingError, check_whole
from data_pipeline.fingerprint import prepared_folder, read_manifest
from data_pipeline.identity import EARLIER
from data_pipeline.mixtures.card import draw_mixture, markdown
from data_pipeline.mixtures.components import Component, check_components, find_components, gather_files, join_folders
from data_pipeline.mixtures.plan import Available, Phase, PlannedPhase, phase_ends, plan, read_phases
from data_pipeline.mixtures.sequences import HeldOutSequences, Mixed, TrainingSequences, collate_components
from data_pipeline.tokens.batches import BlockSequences
from data_pipeline.tokens.datamodule import PackedText
from data_pipeline.tokens.order import RunOrder
from data_pipeline.tokens.yardsticks import NAMES, yardsticks

log = logging.getLogger(__name__)

# Part of every fingerprint: increase a number when that stage writes something else from the same inputs.
MIXTURE_FORMATS = {"documents": 1, "mixture": 1}


@dataclass(kw_only=True, eq=False, repr=False)
class MixtureData(PackedText):
    """Text of several components, read in one run with weights by phase.

    Each component is tokenized and packed separately, with one tokenizer for all, and shared by all mixtures.
    Validation reads the held-out text of every component, even if no phase gives it a weight; its batches contain the
    number of each sequence's component.

    Args:
        corpus: a folder that `job=corpus` wrote; each category is a component.
        components: name -> {path, categories, upsample, max_epochs}. `path`: a folder that `job=corpus` or
            `job=rewrite` wrote, or one of train-*.parquet (and validation-*.parquet). Without it the settings apply to
            the corpus's category of that name; null drops that category. `upsample`: factor on its bytes where bytes
            are its weight. `max_epochs`: overrides the common one.
        phases: in order, each {name, tokens or share, weights}: see `data_pipeline.mixtures.plan`. None: one phase, in
            which components are weighted by their bytes.
        max_epochs: how often a component's text is read at most in the run; the other components of a phase fill the
            gap.
        max_tokens: of the whole run.
    """

    max_tokens: int
    corpus: str | None = None
    components: Mapping | None = None
    phases: Sequence[Mapping] | None = None
    max_epochs: float | None = None

    _collate = staticmethod(collate_components)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("data.max_tokens", self.max_tokens, 1)
        check_components(self.corpus, self.components, self.max_epochs)
        self._phases = read_phases(self.phases)
        sequences = math.ceil(self.max_tokens / self.batch_tokens) * (self.batch_tokens // self.sequence_length)
        self._ends = phase_ends(self._phases, self.max_tokens, sequences, self.sequence_length)
        self._blocks: dict[str, Path] = {}
        self._documents: dict[str, Path] = {}
        self._planned: list[PlannedPhase] = []

    def prepare(self) -> None:
        """Find the components, prepare the tokenizer, tokenize each, and plan the run; redo only what changed.

        Raises:
            ValueError: something cannot work; the line names the key or file.
        """
        if self.fingerprint is not None:
            return
        components = find_components(self.corpus, self.components, self.max_epochs)
        self._check_weights(components)
        for component in components:
            self._documents[component.name] = self._prepare_documents(component)
        tokenizer = self._prepare_tokenizer(self._join_documents())
        for component in components:
            self._blocks[component.name] = self._prepare_component(component, tokenizer)
        counted = {name: read_manifest(folder) for name, folder in self._blocks.items()}
        self._planned = self._plan(components, counted)
        folder = self._prepare_mixture(components, counted)
        self.manifest = read_manifest(folder)
        self.component_bytes = {
            name: found["validation"]["bytes"] for name, found in counted.items() if found["validation"]["rows"]
        }
        if not self.component_bytes:
            problem = "have no held-out text"
            raise SettingError("data.components", NO_VALUE, "give one of them validation-*.parquet", problem)
        self.validation_bytes = sum(self.component_bytes.values())
        read = [found["train"] for found in self.manifest["components"].values() if found["read_tokens"]]
        self.train_sequences = sum(found["sequences"] for found in read)
        per_step = self.batch_tokens // self.sequence_length
        self.phase_starts = {phase.first // per_step: phase.name for phase in self._planned}
        self.fingerprint = folder.name.removeprefix("mixture-")
        self._tell(folder)

    def _check_weights(self, components: list[Component]) -> None:
        names = [component.name for component in components]
        for index, phase in enumerate(self._phases):
            for name in phase.weights or ():
                if name not in names:
                    problem = f"is of no component (there are {', '.join(names)})"
                    fix = f"give data.components.{name}.path, or leave the weight out"
                    raise SettingError(f"data.phases[{index}].weights.{name}", NO_VALUE, fix, problem)
        if all(phase.weights for phase in self._phases):
            for component in components:
                if component.upsample is not None:
                    problem = "is a factor on weights by bytes, and every phase gives its weights"
                    fix = "leave it out"
                    raise SettingError(f"data.components.{component.name}.upsample", component.upsample, fix, problem)

    def _prepare_documents(self, component: Component) -> Path:
        identity, earlier = (
            {"format": MIXTURE_FORMATS["documents"], "component": component.identity(by)}
            for by in (self.identified_by, EARLIER)
        )
        build = functools.partial(gather_files, component.files, component.written)
        folder = prepared_folder(self.data_dir, "documents", identity, build, earlier)
        if not read_manifest(folder)["train"]["bytes"]:
            problem = f"has no training text ({component.files['train'][0].parent})"
            fix = f"give it some, or leave it out (data.components.{component.name}=null)"
            raise SettingError(f"data.components.{component.name}", NO_VALUE, fix, problem)
        return folder

    def _join_documents(self) -> Path:
        """Return a documents folder of all components together, for training the tokenizer."""
        folders = list(self._documents.values())
        identity = {"format": MIXTURE_FORMATS["documents"], "joined": [folder.name for folder in folders]}
        return prepared_folder(self.data_dir, "documents", identity, functools.partial(join_folders, folders))

    def _prepare_component(self, component: Component, tokenizer: Path) -> Path:
        try:
            return self._prepare_blocks(self._documents[component.name], tokenizer)
        except SettingError as error:
            if error.key != "data.block_length":
                raise
            key = f"data.components.{component.name}"
            problem = f"has less training text than data.block_length={self.block_length} tokens"
            fix = f"lower that, give it more text, or leave it out ({key}=null)"
            raise SettingError(key, NO_VALUE, fix, problem) from error

    def _plan(self, components: list[Component], counted: dict[str, dict]) -> list[PlannedPhase]:
        available = [Available(c.name, _limit(c, self._sequences_of(counted[c.name]))) for c in components]
        by_bytes = [Fraction(c.upsample or 1) * counted[c.name]["train"]["bytes"] for c in components]
        phases: list[Phase] = self._phases[: len(self._ends)]
        weights = [
            by_bytes if phase.weights is None else [phase.weights.get(c.name, Fraction(0)) for c in components]
            for phase in phases
        ]
        return plan(phases, self._ends, weights, available, self.sequence_length)

    def _sequences_of(self, counted: dict) -> int:
        return counted["train"]["rows"] * (self.block_length // self.sequence_length)

    def _prepare_mixture(self, components: list[Component], counted: dict[str, dict]) -> Path:
        """Write the manifest, its tables and picture. Text and lengths name the folder; the seed does not."""
        identity = {
            "format": MIXTURE_FORMATS["mixture"],
            "components": {component.name: self._blocks[component.name].name for component in components},
            "max_epochs": {component.name: component.max_epochs for component in components},
            "sequence_length": self.sequence_length,
            "phases": [
                [phase.name, phase.first, phase.end, [str(share) for share in phase.shares], phase.counts]
                for phase in self._planned
            ],
        }

        def build(folder: Path) -> dict:
            manifest = self._describe(components, counted)
            write_atomic(folder / "mixture.md", markdown(manifest))
            draw_mixture(manifest, folder / "mixture.png")
            return manifest

        return prepared_folder(self.data_dir, "mixture", identity, build)

    def _describe(self, components: list[Component], counted: dict[str, dict]) -> dict:
        length, planned = self.sequence_length, self._planned
        described, reduced = {}, []
        for number, component in enumerate(components):
            found = counted[component.name]
            sequences = self._sequences_of(found)
            limit = _limit(component, sequences)
            read = sum(phase.counts[number] for phase in planned)
            asked = sum((phase.end - phase.first) * phase.shares[number] for phase in planned)
            if limit is not None and asked > limit:
                reduced.append(
                    f"{component.name}: {component.max_epochs:g} epochs are {limit * length:,} tokens of the "
                    f"{int(asked * length):,} that its weights ask for; the others of each phase take the rest"
                )
            described[component.name] = {
                "documents": self._documents[component.name].name,
                "blocks": self._blocks[component.name].name,
                "max_epochs": component.max_epochs,
                "upsample": component.upsample,
                "train": {**found["train"], "sequences": sequences},
                "validation": found["validation"],
                "read_sequences": read,
                "read_tokens": read * length,
                "epochs": read / sequences,
            }
        phases = [self._describe_phase(phase, described) for phase in planned]
        return {
            "run_tokens": planned[-1].end * length,
            "sequence_length": length,
            "block_length": self.block_length,
            "vocab_size": len(self.hf_tokenizer),
            "components": described,
            "phases": phases,
            "reduced": reduced,
        }

    def _describe_phase(self, phase: PlannedPhase, described: dict[str, dict]) -> dict:
        size, length = phase.end - phase.first, self.sequence_length
        rows = zip(described.items(), phase.shares, phase.counts, phase.before, strict=True)
        return {
            "name": phase.name,
            "first": phase.first,  # position in the run, in sequences
            "end": phase.end,
            "tokens": size * length,
            "components": {
                name: {
                    "asked_share": float(share),
                    "share": count / size,
                    "sequences": count,
                    "tokens": count * length,
                    "epochs_at_end": (before + count) / found["train"]["sequences"],
                }
                for (name, found), share, count, before in rows
            },
        }

    def _tell(self, folder: Path) -> None:
        log.info("mixture: %d components; tables and a picture are in %s", len(self._blocks), folder)
        for phase in self.manifest["phases"]:
            shares = ", ".join(
                f"{name} {found['share']:.1%}" for name, found in phase["components"].items() if found["share"]
            )
            log.info("%s: %s tokens: %s", phase["name"], f"{phase['tokens']:,}", shares)
        if self.manifest["reduced"]:
            log.warning("data.max_epochs: %s", "; ".join(self.manifest["reduced"]))
        left_out = [phase.name for phase in self._phases[len(self._planned) :]]
        if left_out:
            log.warning("max_tokens=%d ends the run before %s", self.max_tokens, ", ".join(left_out))

    def open(self, split: str, length: int) -> Mixed:
        """Return a split's sequences, memory-mapped: train by position in the run, validation each once."""
        if split == "validation":
            return HeldOutSequences([self._part(name, split, length) for name in self.component_bytes])
        read = [any(phase.counts[number] for phase in self._planned) for number in range(len(self._blocks))]
        parts = [
            self._part(name, split, length) if used else None for name, used in zip(self._blocks, read, strict=True)
        ]
        return TrainingSequences(self._planned, list(self._blocks), parts, self.seed)

    def _part(self, name: str, split: str, length: int) -> BlockSequences:
        return self._open_blocks(self._blocks[name], split, length)

    def _train_order(self, total: int, micro_batches: int, start: int, rank: int, world_size: int) -> Sampler:
        positions = micro_batches * world_size * self.micro_batch_size
        if positions > total:
            problem = (
                f"asks for {positions * self.sequence_length} tokens, and the mixture is planned for "
                f"data.max_tokens={self.max_tokens}"
            )
            raise SettingError("trainer.max_steps", NO_VALUE, "set max_tokens alone", problem)
        return RunOrder(self.micro_batch_size, micro_batches, start, rank, world_size)

    def yardsticks(self) -> dict[str, float | None]:
        """Return the bits per byte of all held-out text, with a unigram model, or xz, per component."""
        self.prepare()
        size, text_bytes = self.manifest["vocab_size"], sum(self.component_bytes.values())
        bits: dict[str, float | None] = dict.fromkeys(NAMES, 0.0)
        for name, held_out in self.component_bytes.items():
            for key, value in yardsticks(self._documents[name], self._blocks[name], size, held_out).items():
                before = bits[key]
                bits[key] = None if value is None or before is None else before + value * held_out
        return {key: None if total is None else total / text_bytes for key, total in bits.items()}


def _limit(component: Component, sequences: int) -> int | None:
    """Return how many sequences of a component the run may read at most; None for no limit."""
    return None if component.max_epochs is None else math.floor(Fraction(component.max_epochs) * sequences)
