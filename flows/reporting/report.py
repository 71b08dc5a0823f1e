"""A run's report: report.json, the reward curve, and the markdown that Prefect shows."""

import base64
import io
import json
import math
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from infra.orchestration.events import Failure, RunFailed
from infra.storage.artifacts import ArtifactRef, open_artifact

if TYPE_CHECKING:
    from flows.reporting.confidence import Estimate
    from flows.reporting.evaluation import Evaluation

SHOWN = {
    "reward": ("reward/mean", "{:.3f}"),
    "k3": ("update/k3_mean", "{:.1e}"),
    "entropy": ("update/entropy", "{:.2f}"),
    "grad norm": ("update/grad_norm", "{:.2f}"),
}


def reward_curve(history: list[dict[str, Any]], heldout: dict[str, float]) -> bytes:
    """The mean reward by step, and held-out accuracy before and after, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = [entry["step"] + 1 for entry in history]
    axes.plot(
        steps,
        [entry["metrics"]["reward/mean"] for entry in history],
        marker="o",
        markersize=3,
        label="reward (step mean)",
    )
    ends = {"before": 0, "after": steps[-1] if steps else 0}  # of version 0, and of the one after the last step
    points = [(ends[when], value) for when, value in heldout.items() if when in ends]
    if points:
        axes.scatter(*zip(*points, strict=True), marker="D", color="tab:orange", zorder=3, label="held-out accuracy")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()


def curves(history: list[dict[str, Any]]) -> bytes:
    """Reward, entropy, k3 and gradient norm by step, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(8, 5), layout="constrained", sharex=True)
    steps = [entry["step"] + 1 for entry in history]
    for axis, (name, (metric, _)) in zip(axes.flat, SHOWN.items(), strict=True):
        values = [entry["metrics"].get(metric, math.nan) for entry in history]  # not every step measures them all
        axis.plot(steps, values, marker="o", markersize=3)
        axis.set(title=name, yscale="log" if name == "k3" and any(value > 0 for value in values) else "linear")
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("step")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80)
    pyplot.close(figure)
    return buffer.getvalue()


def data_url(png: bytes) -> str:
    """A picture as a URL that needs no server: Prefect shows it wherever its UI runs."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def step_samples(scored: ArtifactRef, dataset_prompts: dict[str, str], rows: int = 8) -> list[dict[str, Any]]:
    """Some of a step's samples, spread over its prompts: prompt, response, reward, advantage."""
    return [
        {
            "prompt": _short(dataset_prompts.get(row["prompt_id"], row["prompt_id"])),
            "response": _short(row["response_text"]),
            "reward": round(row["reward"], 3),
            "advantage": round(row["advantage"], 3),
        }
        for row in _spread(open_artifact(scored).table("scored"), rows).to_pylist()
    ]


def step_markdown(step: int, metrics: dict[str, float], samples: list[dict[str, Any]], scored: ArtifactRef) -> str:
    """The page of a step: its metrics, and sampled prompts, responses and rewards as a table."""
    lines = [f"# Step {step + 1}", "", "| prompt | response | reward | advantage |", "| --- | --- | ---: | ---: |"]
    for row in samples:
        lines.append(
            f"| {_cell(row['prompt'])} | {_cell(row['response'])} | {row['reward']:.2f} | {row['advantage']:+.2f} |"
        )
    lines += ["", "| metric | value |", "| --- | ---: |"]
    lines += [f"| {_cell(key)} | {value:.6g} |" for key, value in sorted(metrics.items())]
    lines[1:1] = [f"\n{why.capitalize()}. The policy is as before." for why in nothing_learned(metrics)]
    return "\n".join([*lines, "", f"Artifact: `{scored.uri}`"])


def prompt_text(row: dict[str, Any]) -> str:
    """What a person reads as the prompt: the last message, or the text."""
    return json.loads(row["messages"])[-1]["content"] if row["messages"] else row["text"]


def step_line(step: int, steps: int, metrics: dict[str, float], eta_s: float) -> str:
    """One line of progress."""
    figures = [f"{name} {form.format(metrics[key])}" for name, (key, form) in SHOWN.items() if key in metrics]
    shown = "  ".join([*figures, *nothing_learned(metrics)])
    times = "  ".join(f"{stage} {metrics[f'seconds/{stage}']:.1f} s" for stage in ("rollout", "update", "sync"))
    rate = f"{metrics['tokens_per_s']:.0f} tok/s"
    return f"step {step + 1:>3}/{steps}  {shown}  |  {times}  |  {rate}, {eta_s / 60:.1f} min left"


def nothing_learned(metrics: dict[str, float]) -> list[str]:
    """Why a step did not change the policy; empty if it did."""
    if metrics.get("update/updated", 1.0):
        return []
    groups, equal = metrics["reward/groups"], metrics["reward/groups_zero_variance"]
    if not groups:
        return ["nothing to learn: no sample is left"]
    of = "all" if equal == groups else f"{equal:.0f} of"
    masked = metrics["reward/masked_samples"]
    besides = f", {masked:.0f} of {metrics['reward/samples']:.0f} samples are masked" if masked else ""
    return [f"nothing to learn: {of} {groups:.0f} groups have equal rewards{besides}"]


def _spread(table: pa.Table, rows: int) -> pa.Table:
    stride = max(1, table.num_rows // rows)
    return table.take(pa.array(range(0, table.num_rows, stride)[:rows], pa.int64()))  # of no rows: a type all the same


def _short(text: str, longest: int = 160) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= longest else flat[: longest - 3] + "..."


def _cell(text: str, longest: int = 160) -> str:
    """A model's text in a table of markdown: it must not end the cell, nor be taken for HTML."""
    return _short(text, longest).replace("|", "\\|").replace("<", "&lt;")


def run_markdown(name: str, links: dict[str, str], values: dict[str, Any], history: list[dict[str, Any]]) -> str:
    """The page of a run: where its things are, its figures and its steps."""
    lines = [f"# Run {name}", "", "| | |", "| --- | --- |", *[f"| {what} | {where} |" for what, where in links.items()]]
    lines += ["", "| figure | value |", "| --- | ---: |"]
    lines += [f"| {key} | {_figure(value)} |" for key, value in values.items() if not isinstance(value, dict)]
    lines += ["", "| step | reward | k3 | grad norm |", "| ---: | ---: | ---: | ---: |"]
    for entry in history:
        metrics = entry["metrics"]
        shown = [SHOWN[name] for name in ("reward", "k3", "grad norm")]
        figures = [form.format(metrics[key]) if key in metrics else "-" for key, form in shown]
        lines.append(f"| {' | '.join([str(entry['step'] + 1), *figures])} |")
    return "\n".join(lines)


def summary_lines(values: dict[str, Any], folder: str, mlflow_uri: str, mlflow_run: str | None) -> list[str]:
    """What a run says at its end: the figures, and where to look."""
    shown = lambda name, form="{:.3f}": form.format(values[name]) if values[name] is not None else "-"  # noqa: E731
    where = f"run {mlflow_run} in {mlflow_uri}" if mlflow_run else mlflow_uri
    return [
        "",
        f"run {values['run']} is complete: {values['steps']} steps, {values['seconds'] / 60:.1f} minutes",
        f"  reward             {shown('reward_first')} -> {shown('reward_last')}",
        f"  held-out accuracy  {shown('heldout_before')} -> {shown('heldout_after')}",
        f"  k3 (vLLM, trainer) {shown('k3_mean', '{:.1e}')}",
        f"  outside engines    {shown('overhead_share', '{:.1%}')} of a step",
        *([f"  nothing to learn   in {idle} of the steps"] if (idle := values.get("idle_steps")) else []),
        f"  peak memory        {shown('peak_rss_gib', '{:.1f}')} GiB",
        f"  policy             {values['policy_digest']}",
        f"  artifacts          {folder}",
        f"  reward curve       {folder}/reward.png",
        "",
        "See this run:",
        "  Prefect            make prefect-ui    then http://127.0.0.1:4200/runs",
        f"  MLflow             make mlflow-ui     then http://127.0.0.1:5000 ({where})",
    ]


def evaluation_lines(result: "Evaluation") -> list[str]:
    """What an evaluation says in a terminal."""
    percent = f"{result.confidence:.0%}"
    where = (
        f"{result.environment.rpartition('/')[2]}, {result.split}: {result.accuracy.prompts} prompts x {result.samples}"
    )
    lines = [
        f"run {result.run}, version {result.version} ({where})",
        f"  accuracy   {_interval(result.accuracy)} ({percent} interval)",
    ]
    if result.baseline and result.gain:
        lines += [
            f"  baseline   {_interval(result.baseline)} (run {result.baseline_run}, version {result.baseline_version})",
            f"  gain       {_interval(result.gain, '+.3f')}, paired by prompt",
        ]
    return lines


def evaluation_markdown(result: "Evaluation") -> str:
    """The page of an evaluation."""
    rows = [("accuracy", result.accuracy), ("baseline", result.baseline), ("gain (paired by prompt)", result.gain)]
    lines = [
        f"# Run {result.run}, version {result.version}",
        "",
        f"Environment `{result.environment}`, split `{result.split}`, {result.samples} samples a prompt.",
        "",
        f"| | mean | {result.confidence:.0%} interval | standard error | prompts |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    for name, value in rows:
        if value:
            interval = f"{value.low:.3f} to {value.high:.3f}"
            lines.append(f"| {name} | {value.mean:.3f} | {interval} | {value.standard_error:.3f} | {value.prompts} |")
    if result.baseline:
        lines += ["", f"The baseline is version {result.baseline_version} of run {result.baseline_run}."]
    return "\n".join([*lines, "", f"Policy: `{result.policy.uri}`", "", f"Dataset: `{result.dataset.uri}`"])


def dataset_markdown(name: str, ref: ArtifactRef, metadata: dict[str, Any], sample: list[str]) -> str:
    """The page of a dataset."""
    lines = [f"# Dataset {name}", "", "| split | prompts |", "| --- | ---: |"]
    lines += [f"| {split} | {count} |" for split, count in metadata["prompts"].items()]
    dropped = ", ".join(f"{count} {cause}" for cause, count in metadata["dropped"].items() if count)
    lines += ["", f"Left out: {dropped or 'nothing'}", "", "| the first prompts of train |", "| --- |"]
    lines += [f"| {_cell(text)} |" for text in sample]
    return "\n".join([*lines, "", f"Artifact: `{ref.uri}`", "", f"Digest: `{ref.digest}`"])


def failure_markdown(title: str, failure: Failure) -> str:
    """The page of a flow run that did not end well: why, and what to do."""
    page = f"# {title}: {failure.state}\n\n{_cell(failure.reason, 1000)}\n\n**What to do:** {failure.advice}"
    if not isinstance(failure, RunFailed):
        return page
    step = failure.step
    committed = "nothing is committed yet" if step is None else f"{step} steps are committed and are not done again"
    return f"{page}\n\nOf this run, {committed}."


def publication_markdown(lineage: dict[str, str], result: dict[str, Any], evaluation: "Evaluation") -> str:
    """The page of a published model."""
    lines = [
        f"# {result['name']} version {result['model_version']}",
        "",
        result["decision"],
        "",
        f"Folder: `{result['folder']}`",
        "",
        "| lineage | |",
        "| --- | --- |",
        *[f"| {key} | `{value}` |" for key, value in sorted(lineage.items())],
        "",
    ]
    return "\n".join(lines) + "\n" + evaluation_markdown(evaluation)


def artifact_key(name: str, which: str) -> str:
    """What the keys of pages about `name` begin with, in Prefect's characters: lower case, digits and dashes. A server has
    the pages of many stores; `which` (an id) tells what else is called so, or nearly so, apart."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in f"{name}-{which}".lower())


def _interval(value: "Estimate", form: str = ".3f") -> str:
    return f"{value.mean:{form}}, {value.low:{form}} to {value.high:{form}}"


def _figure(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
