"""bebop's command line: run | rerun | compile | doctor.

Heavy libraries are imported inside the commands that need them, so that `compile` is quick and
works where only kfp is installed.
"""

import argparse
import sys
from pathlib import Path

from bebop.errors import BebopError, disk_full, is_disk_full
from workflows.stages import STAGES

DEFAULT_PROFILE = "laptop"


def main(arguments: list[str] | None = None) -> int:
    """Parse and carry out a command; returns the exit status."""
    options = make_parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except BebopError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if not is_disk_full(error):
            raise
        print(f"\nerror: {disk_full(error.filename)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; finished stages are kept", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(prog="pipeline.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run the five stages on this machine")
    _add_profile(run)
    _add_runs_dir(run)
    run.set_defaults(command=run_command)

    rerun = commands.add_parser("rerun", help="run one stage of a run again, and what follows it")
    rerun.add_argument("stage", choices=STAGES)
    rerun.add_argument("--run", required=True, metavar="ID", help="the run to take up")
    _add_overrides(rerun)
    _add_runs_dir(rerun)
    rerun.set_defaults(command=rerun_command)

    compile_ = commands.add_parser("compile", help="write the IR that Kubeflow accepts")
    _add_profile(compile_)
    compile_.add_argument("-o", "--output", type=Path, default=Path("bebop.yaml"))
    compile_.add_argument("--image", help="image for every stage; default: by git SHA")
    compile_.set_defaults(command=compile_command)

    doctor = commands.add_parser("doctor", help="what is installed and which profile can run here")
    doctor.set_defaults(command=doctor_command)
    return parser


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", default=DEFAULT_PROFILE, metavar="NAME|FILE.toml")
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="STAGE.KEY=VALUE"
    )


def _add_runs_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="DIR")


def run_command(options: argparse.Namespace) -> int:
    """`run`: the whole graph."""
    from workflows.local_run import run

    run(options.profile, options.overrides, options.runs_dir, sys.argv)
    return 0


def rerun_command(options: argparse.Namespace) -> int:
    """`rerun`: from one stage on."""
    from workflows.local_run import rerun

    rerun(options.stage, options.run, options.overrides, options.runs_dir, sys.argv)
    return 0


def compile_command(options: argparse.Namespace) -> int:
    """`compile`: IR for the Kubeflow UI."""
    from workflows.compile import compile_pipeline

    path = compile_pipeline(options.profile, options.overrides, options.output, options.image)
    print(f"wrote {path}: upload it in the Kubeflow UI (Kubeflow Pipelines 2.17 or newer)")
    return 0


def doctor_command(options: argparse.Namespace) -> int:
    """`doctor`: a look at this machine."""
    from workflows.doctor import doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())
