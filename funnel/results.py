"""The rounds of distill.py as a table and as a picture, and the report at their end."""
import shutil

from funnel.retire import residual_state
from funnel.state import entries
from rl.evaluation import success_table
from rl.logs import picture, read

LABELS = ("00", "01", "10", "11", "?")


def round_table(lines) -> str:
    """rounds.jsonl for the terminal."""
    def share(value):
        return "-" if value is None else f"{value:.3f}"

    text = ["round  state      edits  00/01/10/11/?    selected  policy    retired  entries  state-free  with state"]
    for row in lines:
        labels = "/".join(str(row["labels"].get(name, 0)) for name in LABELS) if row["labels"] else "-"
        state, policy = ("-" if row[name] is None else "accepted" if row[name] else "rejected"
                         for name in ("state_accepted", "policy_accepted"))
        text.append(f"{row['step']:>5}  {state:<9}  {len(row['edits']):>5}  {labels:<15}  "
                    f"{'-' if row['selected'] is None else row['selected']:>8}  {policy:<8}  {len(row.get('retired', [])):>7}  "
                    f"{row['entries']:>7}  {share(row['success_free']):>10}  {share(row['success_state']):>10}")
    return "\n".join(text)


def final_report(run, k, policy, state):
    """The only place where test tasks are played. Writes the residual state and adapter/. state: with all its entries."""
    residual = residual_state(run, policy, state) if policy else state
    run.write_state("residual", residual)
    rows = [run.evaluation(k, "test", own, text, who)
            for own, who in ((0, "base"), (policy, "trained")) for text in dict.fromkeys(("", state))]
    if state:
        rows.append(run.evaluation(k, "test", policy, residual, residual=True))
    adapter, beside = run.folder / "adapter", run.folder / "adapter.new"
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(run.folder / "policies" / f"{policy:03d}", beside)
    shutil.rmtree(adapter, ignore_errors=True)
    beside.rename(adapter)
    return {"evaluations": rows, "entries": len(entries(state)), "residual_entries": len(entries(residual))}


def report_table(config, evaluations, policy) -> str:
    """The paper's Table 5 and one row more, the first policy with the last state; from what `final_report` found. Policy 0 is no
    consolidated one."""
    evaluations = [row for row in evaluations if policy or row["policy"] == "base"]
    names = [("initial" if row["policy"] == "base" else "consolidated") + (
        ", + residual state" if row.get("residual") else ", + full state" if row["state"] else "") for row in evaluations]
    return success_table(" ".join([config.env, *config.env_options]), zip(names, evaluations))


def draw_rounds(folder, path):
    """Success on valid and test tasks over the rounds, with and without the state."""
    rows = [row for row in read(folder / "evaluations.jsonl") if row["policy"] == "trained" and not row.get("residual")]
    with picture(path, figsize=(6.4, 3.6)) as (_, axes):
        for colour, has_state, name in (("C0", False, "state-free"), ("C1", True, "with the state")):
            for split, marker in (("valid", "o-"), ("test", "s")):
                these = [row for row in rows if (row["split"], row["state"]) == (split, has_state)]
                if these:
                    errors = [[abs(row["success"] - row["interval"][side]) for row in these] for side in (0, 1)]
                    axes.errorbar([row["step"] + 0.06 * has_state for row in these], [row["success"] for row in these], errors,
                                  fmt=marker, color=colour, markersize=4, capsize=2, label=f"{name}, {split} tasks (95 %)")
        for row in read(folder / "rounds.jsonl"):
            said = [word for word, name in (("state", "state_accepted"), ("policy", "policy_accepted")) if row[name]]
            axes.text(row["step"], 1.03, "\n".join(said), ha="center", va="bottom", fontsize=7, color="0.3")
        axes.set(xlabel="round (what was accepted above)", ylim=(-0.02, 1.02), ylabel="success")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=7)
