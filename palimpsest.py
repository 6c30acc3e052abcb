"""The command `palimpsest`: compose conf/, and call the configured job.

Heavy imports are avoided: `palimpsest --help` and mistakes in overrides answer before torch is loaded.
"""

import contextlib
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from common.atomic_files import is_full_disk
from common.settings import NO_VALUE, SettingError
from common.uncollected import uncollected
from lit_modules.launching import arguments, failures, hydra_messages, run_folder, start
from lit_modules.launching.command_line import check_command_line
from lit_modules.launching.process import this_process
from lit_modules.launching.supervision import fork_supervisor

HERE = Path(__file__).resolve().parent
INSTALLED_CONF = HERE / "palimpsest_conf"  # conf/'s name in a wheel
CONF = INSTALLED_CONF if INSTALLED_CONF.is_dir() else HERE / "conf"
USER_ERROR = 2


def main() -> None:
    """Run the command line. A user's mistake prints one line on stderr and exits with status 2."""
    fork_supervisor()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise the original error instead of printing part of it
    start.register_resolvers()
    with one_line_errors():
        refuse_the_other_kernels_package()
        sys.argv[1:] = arguments.prepare_arguments(sys.argv[1:], CONF)
        check_command_line(sys.argv[1:], CONF)
        compose_and_run()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def compose_and_run(cfg: DictConfig) -> None:
    """Call the function that `job._target_` names with the composed configuration."""
    with one_line_errors():  # also here: Hydra adds its own lines to errors that leave this function
        if cfg.job.makes_a_run:
            begin_and_run(cfg, Path(HydraConfig.get().runtime.output_dir))
        else:
            start.check_switches(cfg)
            job(cfg)(cfg)


def begin_and_run(cfg: DictConfig, folder: Path) -> None:
    """Call a job that makes a run, on each rank; a refused run leaves no folder."""
    begun = False
    try:
        start.check_switches(cfg)
        begun = start.prepare_rank(cfg, folder)
        if begun:
            with failures.report_first_failure(folder, cfg.debug, mistake):
                job(cfg)(cfg)
    except Exception as error:
        refused = error.status == USER_ERROR if isinstance(error, run_folder.SilentExit) else mistake(error) is not None
        if this_process().rank == 0 and (refused or not begun):
            run_folder.discard_unstarted(folder)
        raise


def job(cfg: DictConfig) -> Callable[[DictConfig], None]:
    """Return the function that `job._target_` names.

    Raises:
        ValueError: it is missing, or is not a job.
    """
    try:
        is_imported = str(cfg.job._target_).rpartition(".")[0] in sys.modules
        with contextlib.nullcontext() if is_imported else uncollected():
            found = hydra.utils.get_method(cfg.job._target_)
        names = list(inspect.signature(found).parameters)
    except (ImportError, HydraException, ValueError) as error:
        raise ValueError(f"job._target_={cfg.job._target_} cannot be called: {error}") from error
    if names != ["cfg"]:
        raise ValueError(
            f"job._target_={cfg.job._target_} is not a job: give a function of one argument, cfg, such as "
            "lit_modules.jobs.pretrain.run, or choose one with job=..."
        )
    return found


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Exit with one line on stderr for a user's mistake (status 2) or a run that stopped (status 1)."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if this_process().rank == 0:
            print(f"palimpsest: interrupted{interrupt}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        known = full_disk(error) or ours(error)
        if any(argument.lower() == "debug=true" for argument in sys.argv[1:]):
            raise
        if isinstance(known, run_folder.SilentExit):
            sys.exit(known.status)
        line = str(known) if isinstance(known, run_folder.RunFailed) else mistake(error)
        if line is None:
            raise
        # Before the rendezvous, all ranks of a node make the same mistake.
        if this_process().local_rank == 0 or isinstance(known, run_folder.RunFailed):
            print(f"palimpsest: {line}", file=sys.stderr)
        sys.exit(1 if isinstance(known, run_folder.RunFailed) else USER_ERROR)


def full_disk(error: Exception) -> run_folder.RunFailed | None:
    """Return the error for a full disk or quota; None for any other error."""
    if not is_full_disk(error):
        return None
    return run_folder.RunFailed(
        f"{error.filename or 'a file'} could not be written ({error.strerror}): make room, then retry"
    )


def mistake(error: Exception) -> str | None:
    """Return the line for a user's mistake; None for any other error."""
    if isinstance(error, HydraException | OmegaConfBaseException | ValueError | yaml.YAMLError):
        return one_line(error)
    if not isinstance(error, ModuleNotFoundError) or (extra := extra_with(error.name or "")) is None:
        return None
    fix = f"it belongs to an extra: run `pip install 'palimpsest-lm[{extra}]'`"
    return f"the package {error.name} is not installed; {fix}"


def extra_with(module: str) -> str | None:
    """Return our smallest extra that installs a module; None without one."""
    name = module.partition(".")[0].replace("_", "-").lower()
    found = re.compile(rf'{re.escape(name)}\b[^;]*; extra == "(\w+)"')
    requirements = importlib.metadata.requires("palimpsest-lm") or []
    extras = [match[1] for line in requirements if (match := found.match(line.replace("_", "-").lower()))]
    sizes = {extra: sum(f'extra == "{extra}"' in line for line in requirements) for extra in extras}
    return min(sizes, key=lambda extra: sizes[extra], default=None)


def refuse_the_other_kernels_package() -> None:
    """Raise ValueError if the distribution `kernels` is installed: it and our folder would shadow each other.

    transformers imports that distribution if present, and would get our folder instead.
    """
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ValueError(
        f"the package kernels {version} is installed in this environment, and has the name of a folder of ours that "
        "transformers would mistake for it: run `pip uninstall kernels`, or use an environment of its own"
    )


def one_line(error: BaseException) -> str:
    """Return the error's message on one line, with the configuration key that Hydra was building, if any."""
    if isinstance(error.__cause__, MissingMandatoryValue) or not str(error):  # Hydra wrapped the actual error
        error = error.__cause__ or error
    place, text = None, ""
    if isinstance(error, MissingMandatoryValue):
        error = SettingError(str(error.full_key), NO_VALUE, "give it a value", "is missing")
    elif isinstance(error, hydra.errors.InstantiationException) and error.__cause__ is not None:
        place, error = hydra_messages.built_key(error), error.__cause__
    elif isinstance(error, hydra.errors.OverrideParseException):
        text = (
            f"{error.override} cannot be read as KEY=VALUE: close its brackets and quotes, and give a value with "
            "special characters two pairs of quotes, as in \"KEY='a[b'\""
        )
    elif isinstance(error, OmegaConfBaseException) and (known := ours(error)):
        error = known
    elif left_out := hydra_messages.key_left_out(error):  # a group
        error = SettingError(getattr(error, "full_key", None) or left_out, NO_VALUE, "the job needs it", "is missing")
    elif isinstance(error, OmegaConfBaseException):
        place, text = error.full_key, error.msg or str(error).splitlines()[0]
    elif merged := hydra_messages.merged_override(error):
        fix = f"it has keys, give them as {merged[0]}.NAME=VALUE, or null for none"
        error = SettingError(*merged, fix, "is not known")
    if place and isinstance(error, SettingError):
        error.under(place)
    line = " ".join((text or str(error)).split())
    return line if not place or isinstance(error, SettingError) or place in line else f"{place}: {line}"


def ours(error: BaseException | None) -> Exception | None:
    """Return our own error: this one, or the one that a function called by the configuration raised behind it."""
    behind = isinstance(error, OmegaConfBaseException)
    while error is not None:
        if isinstance(error, ValueError | run_folder.RunFailed | run_folder.SilentExit) and not isinstance(
            error, OmegaConfBaseException
        ):
            return error
        error = error.__cause__ or error.__context__ if behind else None
    return None


if __name__ == "__main__":
    main()
