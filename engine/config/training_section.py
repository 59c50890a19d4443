"""The section ``training`` of the configuration: how long a run trains, and what it does on the
way.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .section import NonNegativeInt, PathText, PositiveInt, Section, Seed


class TasksSection(Section):
    """Tasks of lm-evaluation-harness on the full model, while a run trains.

    ``tasks``: names of tasks or groups, such as "hellaswag". They may compare log-likelihoods, but
    not generate text. ``every``: number of steps. 0 evaluates them after the last step only.
    ``limit``: the first documents of each task; all by default. ``num_fewshot``: examples in a
    prompt; by default those of the task. ``include_path``: a directory with task files of your
    own. A task file may name Python code, which then runs.
    """

    tasks: Annotated[list[str], Field(min_length=1)]
    every: NonNegativeInt = 0
    limit: PositiveInt | None = None
    num_fewshot: NonNegativeInt | None = None
    include_path: PathText | None = None


class TrainingSection(Section):
    """The length of the run, and how often it evaluates and saves.

    ``evaluate_every``, ``save_every``: numbers of steps. 0 evaluates only before the first step and
    after the last, and saves only when a signal ends the run.
    ``evaluate_tasks``: tasks of lm-evaluation-harness.
    ``max_failed_saves``: how many saves in a row may fail before the run ends.
    ``max_skips``: how many steps in a row may be skipped for a gradient that is NaN or infinite.
    ``on_spike``: what happens to a step whose loss or gradient norm is a spike, before its update.
    "skip" leaves the update out. "rollback" returns to the last checkpoint, from which the run
    continues with other data. "stop" ends the run. A spike is more than ``spike_sigma`` standard
    deviations above the mean of the last ``spike_window`` steps.
    ``loss_weighting``: how the losses of ranks and micro-batches make one gradient. "tokens" weighs
    each by the number of labels that its loss counts, "ranks" weighs all equally, as DDP does. By
    default ``sdp train`` takes "tokens" if the data mask labels, and a script's
    ``engine.backward(loss, weight=n)`` decides.
    ``start_timeout``: seconds for the start with the first step, or for an evaluation.
    ``save_timeout``: seconds for a save. ``step_timeout``: seconds for a part of a later step. Any
    collective may take the longest of the three.
    ``init_from``: a directory with the first weights, from Hugging Face.
    ``compile``: compile the units with ``torch.compile``.
    ``recalibrate_batches``: training batches per rank, which measure batch norm's statistics of the
    full model before it is evaluated or saved. 0 takes the means over the holders' subnetworks.
    """

    steps: PositiveInt | None = None
    tokens: PositiveInt | None = None
    evaluate_every: NonNegativeInt = 0
    evaluate_batches: PositiveInt = 8
    evaluate_tasks: TasksSection | None = None
    recalibrate_batches: NonNegativeInt = 8
    save_every: NonNegativeInt = 0
    keep: PositiveInt = 2
    max_failed_saves: PositiveInt = 3
    max_skips: NonNegativeInt = 10
    loss_weighting: Literal["tokens", "ranks"] | None = None
    on_spike: Literal["none", "skip", "rollback", "stop"] = "none"
    spike_sigma: Annotated[float, Field(gt=0)] = 6.0
    spike_window: Annotated[int, Field(ge=2, le=2**16)] = 128
    init_from: PathText | None = None
    async_save: bool = False
    start_timeout: Annotated[float, Field(gt=0)] = 1800.0
    save_timeout: Annotated[float, Field(gt=0)] = 1800.0
    step_timeout: Annotated[float, Field(gt=0)] = 600.0
    seed: Seed = 0
    compile: bool = False

    @model_validator(mode="after")
    def _can_roll_back(self) -> Self:
        if self.on_spike == "rollback" and not self.save_every:
            raise ValueError(
                'on_spike "rollback" returns to the last checkpoint, but save_every is 0; set how often to save'
            )
        return self
