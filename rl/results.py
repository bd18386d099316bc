"""How good the policy of a training run is: its evaluations, the best adapter while training, the table at the end.

FEE's paper reports the best of the evaluations made while training, chosen on the test tasks that it reports. Here that one and the
last are both in the table. --eval-split says on which tasks the evaluations while training are: valid, so that the best is chosen
without a look at the test tasks, or test, as in the paper.
"""
import torch

from rl.evaluation import evaluate, fixed_tasks, success_table
from rl.logs import append, draw_curve, is_final, read, save_adapter
from rl.model import other_adapter


class Evaluations:
    """Those of one run. Hints are never shown; the same tasks and the same draws each time."""

    def __init__(self, config, folder, act, chat, envs, tasks, limits, to_board):
        self.config, self.folder, self.act, self.chat, self.envs = config, folder, act, chat, envs
        self.tasks, self.limits, self.to_board, self.last = tasks, limits, to_board, "-"

    def play(self, step, split, policy="trained", final=True) -> dict:
        """A line of evaluations.jsonl."""
        torch.manual_seed(self.config.seed)
        result = evaluate(self.act, self.chat, self.envs, fixed_tasks(self.tasks[split], self.config.eval_episodes), **self.limits)
        row = {"step": step, "split": split, "policy": policy, "final": final, **result}
        append(self.folder / "evaluations.jsonl", row)
        self.to_board({f"success/{split}": row["success"]}, step)
        return row

    def while_training(self, step, model) -> bool:
        """Evaluate on --eval-split. True where no earlier evaluation was as good: its adapter is then adapter-best/."""
        row = self.play(step, self.config.eval_split, final=False)
        self.last = f"{row['success']:.3f}"
        best = self.best() == step
        if best:
            save_adapter(model, self.folder / "adapter-best")
        return best

    def best(self) -> int | None:
        """The step of the best evaluation while training, the first of several; None: there was none."""
        rows = [row for row in read(self.folder / "evaluations.jsonl") if row["policy"] == "trained" and not is_final(row)]
        return max(rows, key=lambda row: (row["success"], -row["step"]), default={"step": None})["step"]

    def at_the_end(self, model) -> str:
        """Base model, trained policy and the best one while training on the test tasks; the picture; returns the table."""
        save_adapter(model, self.folder / "adapter")
        base = next((row for row in read(self.folder / "evaluations.jsonl") if row["policy"] == "base"), None)
        if base is None:
            with model.disable_adapter():
                base = self.play(0, "test", "base")
        steps, best = self.config.steps, self.best()
        rows = [("base model", base)]
        if best not in (None, steps):
            with other_adapter(model, self.folder / "adapter-best"):
                rows.append((f"step {best}, the best on {self.config.eval_split} tasks", self.play(best, "test", "best")))
        rows.append((f"after {steps} steps" if steps else "after the warm start", self.play(steps, "test")))
        draw_curve([self.folder], self.folder / "curve.png")
        return success_table(" ".join([self.config.env, *self.config.env_options]), rows)
