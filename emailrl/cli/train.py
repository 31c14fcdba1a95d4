"""Train a policy's LoRA adapter on its own rollouts, keeping the best model by validation accuracy.

The default is masked mode: real rollouts, training only the tokens the policy sampled. A run is written to
<out>_<mode>, or the next free number after it, and contains best_model/, final/, checkpoint-N/,
metrics.jsonl, evaluations.jsonl, training.log and trajectories/. --adapter starts from previously trained weights and
measures the KL to them (REFERENCE=base: to the base model). Ctrl-C saves the last step. --resume uses the
run's original options unless they are given again; code and servers must be given again. --nproc N trains on N GPUs,
each with PER_DEVICE_TRAIN_BATCH_SIZE questions per step; torchrun -m emailrl train does the same.

Examples:

\b
  emailrl train --preset recommended
  emailrl train --preset recommended --model Qwen/Qwen3-4B --engine vllm
  emailrl train --mode masked --preset quick --model nano
  emailrl train --mode simple --max-steps 20
  emailrl train --adapter outputs/grpo_sft/best_model
  emailrl train --algorithm opd --teacher outputs/teacher --beta 0
  emailrl train --resume latest
  emailrl train --nproc 8 --engine vllm
  emailrl train --nproc 8 --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29500
  emailrl train --resume outputs/grpo_masked/checkpoint-20 --overwrite
  emailrl train --from-openrlhf "--advantage_estimator rloo" > emailrl.toml
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Option

from emailrl.base.errors import UsageError
from emailrl.base.process import INTERRUPTED, leave
from emailrl.cli.inputs import check_inputs, suggest, with_inputs
from emailrl.cli.options import Json, Overrides, Preset, Trust, setting_options
from emailrl.cli.output import print_json, say
from emailrl.ranks.alone import Place
from emailrl.ranks.launch import Launch, launch, restarts
from emailrl.settings import Settings, TrainingSettings, beyond_defaults, load_settings

_cluster = partial(Option, rich_help_panel="Cluster")
SMALLEST_RANK = 1 << 28  # bytes of memory that a rank needs at least, for its libraries


@setting_options(
    "mode algorithm model_name adapter reward engine questions db",
    "max_steps per_device_train_batch_size num_generations learning_rate max_turns max_tokens",
    "train_dataset_size eval_dataset_size eval_steps seed output_dir resume",
    "Cluster: nproc nnodes",
    "Advanced: environment backend num_train_epochs beta temperature save_steps target_accuracy patience",
    "Advanced: wandb_mode teacher thinking chat_template_kwargs tensorboard trackio allow_shared_inbox max_cost",
    "Advanced: verbose show_trajectory_details",
    verbose="Print a line per rollout; log debug messages in training.log.",
)
def train(
    *,
    overrides: Overrides,
    node_rank: Annotated[int | None, _cluster(min=0, help="Number of this host, from 0.")] = None,
    rdzv_endpoint: Annotated[str | None, _cluster(metavar="<host:port>", help="First host and a free port.")] = None,
    max_restarts: Annotated[int, _cluster(min=0, help="Restarts from the last checkpoint after a rank failed.")] = 0,
    preset: Preset = None,
    from_openrlhf: Annotated[
        str | None,
        Option(
            metavar="<flags>",
            rich_help_panel="Advanced",
            help="Print OpenRLHF flags as an emailrl.toml, without training.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace the first run in the output folder; with --resume, its later steps.")
    ] = False,
    trust: Trust = False,
    json: Json = False,
) -> None:
    if from_openrlhf is not None:
        from emailrl.openrlhf import to_toml

        typer.echo(to_toml(from_openrlhf), nl=False)
        return
    settings = load_settings(overrides, preset, trust=trust)
    if max_restarts and settings.rewards.max_cost is not None:
        raise UsageError("--max-cost begins anew with every restart.", "Use one of --max-cost and --max-restarts.")
    if settings.output.resume is None:
        _check(settings)  # before any rank starts
    own = settings.training
    ranks = Launch(own.nproc, own.nnodes, node_rank, rdzv_endpoint, max_restarts, own.rank_start_timeout)
    if does_other_work(ranks, "emailrl.training.team", own, settings.model.device):
        return
    resume, overwrite = _after_restart(settings, settings.output.resume, overwrite)
    if resume is not None:
        settings, resume, overwrite = _with_own_options(settings, resume, overrides, preset, overwrite)
        _check(settings)
    from emailrl.measure.export import check_free
    from emailrl.model.resolve import check_base, resolve_model
    from emailrl.runs.resume import find_start

    output = settings.output
    if output.export_dir is not None:
        check_free(output.export_dir, overwrite=True)  # before training, not after
    check_base(settings.model.name, settings.model.smol_base)
    if resume in (None, "auto"):
        settings = with_inputs(settings)
        resolve_model(find_start(settings).settings.model.name, settings.model.smol_base)
    else:
        check_inputs(settings)  # a resumed run keeps its questions
    if preset is None and resume is None and "learning_rate" not in settings.training.model_fields_set:
        say(f"Note: these are the defaults; --preset recommended sets {beyond_defaults(settings)}")
    from emailrl.cli.live import LiveRun
    from emailrl.training.loop import train as run_training

    with LiveRun(settings, json=json) as live:
        result = run_training(settings, resume=resume, overwrite=overwrite, display=live)
    best = result.run_dir / "best_model"
    best = best if best.is_dir() else result.run_dir / "final"  # no evaluation selected one
    if output.export_dir is not None:
        from emailrl.checkpoints import find_checkpoint
        from emailrl.measure.export import export_checkpoint
        from emailrl.training.report import complete

        found = find_checkpoint(best, result.run_dir)
        try:
            written = export_checkpoint(found, output.export_dir, format=output.export_format, overwrite=True)
        except KeyboardInterrupt:
            say(complete(["the export"]))
            raise
        say(f"Exported {written.checkpoint} to {written.out} ({output.export_format}).")
    if json:
        print_json(result)
    elif not result.learned_nothing:  # else the last lines give the remedies
        suggest(["benchmark", "--checkpoint", os.path.relpath(best)], settings, load_settings({}, trust=trust))


def _check(settings: Settings) -> None:
    """Raise UsageError or EmailRLError for settings that cannot train, before torch or a model is loaded."""
    from emailrl.engines import check_engine
    from emailrl.training.algorithms import resolve

    resolve(settings)
    check_engine(settings, trainable=True)


def does_other_work(ranks: Launch, room: str, training: TrainingSettings, device: str) -> bool:
    """Launch the ranks, or ``follow``, of the module ``room``, as one other than 0; False if this process leads."""
    if ranks.is_needed:
        from emailrl.model.layout import total_memory

        if ranks.nproc > (most := total_memory() // SMALLEST_RANK):
            problem = f"--nproc {ranks.nproc} needs more memory than this host has: {total_memory() / 2**30:.1f} GiB."
            raise UsageError(problem, f"Use {max(1, most)} or fewer.")
        code = launch(ranks, [argument for argument in sys.argv[1:] if argument != "--trust"], say)  # already trusted
        if code == INTERRUPTED:
            leave()  # the ranks have ended; torch may leave behind threads that do not
        if code:
            sys.exit(code)  # no further line: the reason has been printed
        return True
    if Place.here().rank:
        import_module(room).follow(training, device)
        return True
    return False


def _after_restart(settings: Settings, resume: str | None, overwrite: bool) -> tuple[str | None, bool]:
    """The values of ``--resume`` and ``--overwrite`` in a process that may have been restarted. A restart resumes the
    run that the command had started or resumed; if there was none, the options apply unchanged."""
    if not restarts():
        return resume, overwrite
    import psutil  # type: ignore[import-untyped]

    from emailrl.checkpoints import list_checkpoints
    from emailrl.runs.resume import run_to_resume

    training = settings.training
    any_mode = resume is not None and "mode" not in training.model_fields_set  # a new run has that of the settings
    run = run_to_resume(resume or "auto", settings.output.output_dir, training.mode, any_mode=any_mode)
    log = run and run / "training.log"
    if not log or not log.exists() or log.stat().st_mtime < psutil.Process(os.getppid()).create_time():
        return resume, overwrite
    return (str(run) if list_checkpoints(log.parent) else "auto"), False


def _with_own_options(
    settings: Settings, resume: str, given: Mapping[str, Any], preset: str | None, overwrite: bool
) -> tuple[Settings, str, bool]:
    """The resumed run's original settings, overridden by those given now; the run; and ``overwrite``. ``overwrite`` is
    also true if the user agrees at the prompt to lose the run's work after the checkpoint."""
    from emailrl.checkpoints import run_root
    from emailrl.runs.folder import give_back_replaced
    from emailrl.runs.resume import checkpoint_to_resume, loss_of_going_back, run_to_resume

    output_dir, training = settings.output.output_dir, settings.training
    for line in give_back_replaced(run_root(output_dir, training.mode)):
        say(f"Note: {line}")
    directory = run_to_resume(resume, output_dir, training.mode, any_mode="mode" not in training.model_fields_set)
    checkpoint = checkpoint_to_resume(directory, resume) if directory else None
    if directory is None or checkpoint is None:
        return settings, resume, overwrite  # auto, with nothing to resume
    say(f"Resuming from {checkpoint.path} with the options recorded there.")
    if not overwrite and sys.stdin.isatty() and (loss := loss_of_going_back(directory, checkpoint)):
        say(loss)
        if not typer.confirm("Remove it and continue?", err=True):
            raise typer.Exit(1)
        overwrite = True
    own = load_settings(given, preset, recorded=checkpoint.metadata.settings)
    passed_over = [  # settings in the folder's files that the run's own options override
        f"{name.upper()}={getattr(section, name)} (the run: {getattr(getattr(own, place), name)})"
        for place, section in settings
        for name in sorted(section.model_fields_set)
        if getattr(section, name) != getattr(getattr(own, place), name)
    ]
    if passed_over:
        ignored = ", ".join(passed_over)
        say(f"Note: ignored in favor of the run's own settings: {ignored}. Override with flags or the environment.")
    # This run, even if another starts in between; its latest checkpoint is chosen once the run is locked.
    run = str(directory if resume in ("auto", "latest") else checkpoint.path if resume == "best" else resume)
    return own, run, overwrite
