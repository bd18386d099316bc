"""The rounds of distill.py as a table and as a picture."""
from rl.logs import picture, read


def round_table(lines) -> str:
    """rounds.jsonl for the terminal."""
    def share(value):
        return "-" if value is None else f"{value:.3f}"

    text = ["round  state      edits  entries  00/01/10/11    selected  state-free  with state  policy"]
    for row in lines:
        labels = "/".join(str(row["labels"][name]) for name in ("00", "01", "10", "11")) if row["labels"] else "-"
        state, policy = ("-" if row[name] is None else "accepted" if row[name] else "rejected"
                         for name in ("state_accepted", "policy_accepted"))
        text.append(f"{row['step']:>5}  {state:<9}  {len(row['edits']):>5}  {row['entries']:>7}  {labels:<13}  "
                    f"{'-' if row['selected'] is None else row['selected']:>8}  {share(row['success_free']):>10}  "
                    f"{share(row['success_state']):>10}  {policy}")
    return "\n".join(text)


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
