"""ALFWorld with its real engine, on a sample of its real games. Skipped without either; about a minute on two cores.

    python tests/test_alfworld.py [DATA]      # replays the stored walkthrough of every game of the test split
"""
import importlib.util
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]
from enrich import EnrichedEnv, Schedule, walk
from envs import BadInput, alfworld, make_env, select_tasks
from envs.alfworld import TASK_TYPES, ALFWorld
from rl.chat import Chat
from rl.rollout import Request, rollout

ARCHIVE = Path(os.environ.get("SCAFFOLD_FUNNEL_DATA", ROOT.parent / "shared" / "data")) / "alfworld_games.tar.xz"
needs_engine = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("alfworld", "textworld", "fast_downward")),
    reason="needs ALFWorld's engine (pip install --no-deps -r envs/alfworld-requirements.txt)")


def unpack(folder):
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    return str(folder)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The folder of the games."""
    if not ARCHIVE.exists():
        pytest.skip("no alfworld_games.tar.xz in ../shared/data or $SCAFFOLD_FUNNEL_DATA")
    return unpack(tmp_path_factory.mktemp("alfworld"))


@pytest.fixture(scope="session")
def tasks(data):
    """The first test task of each type."""
    found = ALFWorld.tasks("test", data=data)
    return {kind: next(task for task in found if task.startswith(kind)) for kind in TASK_TYPES}


@pytest.fixture
def env(data):
    env = make_env("alfworld", {"data": data})
    yield env
    env.close()


def gold(env, task, seed=0):
    """The episode along `gold_action`: (observation, reward, terminated, info) of each turn, the reset's first."""
    observation, info = env.reset(task=task, seed=seed)
    turns = [(observation, 0.0, False, info)]
    while (action := env.gold_action()) is not None:
        assert len(turns) < 50, f"stuck at {action}"
        observation, reward, terminated, truncated, info = env.step(f"<think>hm</think>\n<action>{action}</action>")
        turns.append((observation, reward, terminated, info))
        assert not truncated and info["valid"]
    return turns


def wander(env, task, number=8):
    """Random admissible play, with text that is no command between: what was done, and what came of it."""
    rng, (observation, info) = random.Random(task), env.reset(task=task, seed=0)
    turns = [(observation, info)]
    for turn in range(number):
        action = rng.choice(info["admissible"]) if turn % 4 else "dance"
        turns.append((action, *env.step(action)))
        info = turns[-1][-1]
        if turns[-1][3]:
            break
    return turns


# --- bad input ---------------------------------------------------------------------------------------------------

def one_line(match, call):
    with pytest.raises(BadInput, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_missing_games_say_how_to_get_them(tmp_path, monkeypatch):
    one_line("alfworld-download", lambda: ALFWorld.tasks("train", data=str(tmp_path)))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    one_line(f"{tmp_path}/nowhere.*ALFWORLD_DATA", lambda: select_tasks("alfworld", "train"))


def test_a_missing_package_says_what_to_install(monkeypatch, tmp_path):
    alfworld.engine.cache_clear()
    monkeypatch.setitem(sys.modules, "fast_downward", None)
    one_line("pip install --no-deps -r envs/alfworld-requirements.txt", lambda: ALFWorld(data=str(tmp_path)))
    alfworld.engine.cache_clear()


@pytest.mark.parametrize("options, word", [({"admissible": "full"}, "full"), ({"rooms": 3}, "rooms")])
def test_bad_options_are_one_line(options, word):
    one_line(word, lambda: make_env("alfworld", options))


def test_an_unknown_split_is_one_line(data):
    one_line("unknown split", lambda: ALFWorld.tasks("dev", data=data))


@needs_engine
@pytest.mark.parametrize("task", ["pick_and_place_simple", "fly/Apple-None-Moon-1/trial", "", "../../etc/passwd", "x\x00y"])
def test_an_unknown_task_is_one_line(env, task):
    one_line("unknown task.*trial_T", lambda: env.reset(task=task, seed=0))


@needs_engine
@pytest.mark.parametrize("content", ['{"solvable": true', '{"solvable": true}', '["solvable": true]',
                                     '["\\"solvable\\": true"]'])
def test_a_damaged_game_is_one_line(tmp_path, content):
    folder = tmp_path / "json_2.1.1" / "train" / "pick_and_place_simple-Apple-None-Bed-1" / "trial_T1"
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text(content)
    if '"solvable": true' in content:
        task, = ALFWorld.tasks("train", data=str(tmp_path))
        one_line("damaged.*alfworld-download", lambda: ALFWorld(data=str(tmp_path)).reset(task=task, seed=0))
    else:
        assert ALFWorld.tasks("train", data=str(tmp_path)) == []


# --- tasks -------------------------------------------------------------------------------------------------------

def test_splits_are_disjoint_in_a_fixed_order_and_hold_all_task_types(data):
    splits = [select_tasks("alfworld", split, options={"data": data}) for split in ("train", "valid", "test")]
    assert [len(split) for split in splits] == [240, 60, 100]       # the sample's
    assert len(set().union(*splits)) == 400
    for split in splits:
        assert split == sorted(split) and {task.split("/")[0] for task in split} == set(TASK_TYPES)
    only = select_tasks("alfworld", "test", ["look_at_obj_in_light"], {"data": data})
    assert len(only) == 14 and only == [task for task in splits[2] if task.startswith("look_at_obj_in_light/")]
    assert ALFWorld.tasks("test", data=f"{data}/json_2.1.1") == splits[2]       # the folder itself will do


def test_games_that_the_benchmark_leaves_out_are_left_out(tmp_path):
    for name, solvable in (("pick_and_place_simple-Apple-None-Bed-1", True), ("pick_and_place_simple-Mug-None-Bed-1", False),
                           ("pick_and_place_with_movable_recep-Apple-Bowl-Bed-1", True),
                           ("pick_heat_then_place_in_recep-AppleSliced-None-Bed-1", True)):
        folder = tmp_path / "json_2.1.1" / "train" / name / "trial_T1"
        folder.mkdir(parents=True)
        (folder / "game.tw-pddl").write_text(json.dumps({"pddl_problem": "", "solvable": solvable}))
    assert ALFWorld.tasks("train", data=str(tmp_path)) == ["pick_and_place_simple/Apple-None-Bed-1/trial_T1"]


# --- an episode --------------------------------------------------------------------------------------------------

@needs_engine
@pytest.mark.parametrize("kind", TASK_TYPES)
def test_the_walkthrough_is_rewarded_once_at_its_end(env, tasks, kind):
    turns = gold(env, tasks[kind])
    assert "Your task is to:" in turns[0][0] and "Welcome" not in turns[0][0]
    assert [turn[1] for turn in turns] == [0.0] * (len(turns) - 1) + [1.0]
    assert [turn[2] for turn in turns] == [False] * (len(turns) - 1) + [True]
    assert [turn[3]["success"] for turn in turns] == [False] * (len(turns) - 1) + [True]
    assert turns[-1][3]["admissible"] == [] and "Commands:" not in turns[-1][0]
    assert env.gold_action() is None and env.action_guidance() is None and env.observation_enrichment() is None
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look")


@needs_engine
def test_an_invalid_command_is_told_changes_nothing_and_never_crashes(env, tasks):
    _, info = env.reset(task=tasks["pick_heat_then_place_in_recep"], seed=0)
    fact = env.observation_enrichment()
    for text in ("dance", "go to", "GO TO MOON 1", "x" * 100_000, "\x00", "\ud800", "{r.name}", "#look.feedback#", "☃",
                 "__import__('os')", "open fridge 1", "<action>dance</action>", "", "hm\nwell", "<action>go to fridge 1", "<think>look"):
        observation, reward, terminated, truncated, after = env.step(text)
        looked = text in ("", "hm\nwell", "<action>go to fridge 1", "<think>look")  # no command in it
        assert observation.startswith(f"{alfworld.LOOKED}\nYou are" if looked else "Nothing happens.") and len(observation) < 3000
        assert (reward, terminated, truncated, after) == (0.0, False, False, info | {"valid": False})
        assert env.observation_enrichment() == fact
    assert env.step("Go To Fridge 1")[4]["valid"]


@needs_engine
def test_what_each_level_of_admissible_shows(env, data, tasks):
    task = tasks["pick_and_place_simple"]
    text, info = env.reset(task=task, seed=0)
    assert all(command in text for command in info["admissible"]) and "go to PLACE" not in env.system_prompt
    bare = make_env("alfworld", {"data": data, "admissible": "none"})
    text, same = bare.reset(task=task, seed=0)
    assert "listed" not in same and same == {key: value for key, value in info.items() if key != "listed"} and "Commands:" not in text
    assert "go to PLACE" in bare.system_prompt
    verbs = {command.split()[0] for turn in gold(bare, task) for command in turn[3]["admissible"]}
    assert {verb for verb in verbs if verb not in bare.system_prompt} == {"help"}
    bare.close()


@needs_engine
def test_same_task_and_seed_same_episode_any_seed_in_any_process(env, data, tasks):
    task = tasks["pick_cool_then_place_in_recep"]
    first = gold(env, task, seed=3)
    env.reset(task=tasks["look_at_obj_in_light"], seed=0)           # another game between leaves nothing behind
    assert gold(env, task, seed=3) == first == gold(env, task, seed=4)
    code = ("import sys; sys.path[:0] = sys.argv[1:3]\nfrom test_alfworld import ALFWorld, gold\n"
            "print(repr(gold(ALFWorld(data=sys.argv[3]), sys.argv[4])))")
    for hashes in ("1", "2"):
        run = subprocess.run([sys.executable, "-c", code, str(ROOT), str(ROOT / "tests"), data, task], text=True,
                             capture_output=True, check=True, env=os.environ | {"PYTHONHASHSEED": hashes})
        assert run.stdout.strip() == repr(first)


@needs_engine
def test_interleaved_instances_do_not_disturb_each_other(env, data, tasks):
    wanted = [tasks[kind] for kind in ("pick_heat_then_place_in_recep",) * 2 + ("pick_two_obj_and_place",)]
    alone = [wander(env, task) for task in wanted]
    several = [make_env("alfworld", {"data": data}) for _ in wanted]
    firsts = [each.reset(task=task, seed=0) for each, task in zip(several, wanted)]
    assert firsts == [turns[0] for turns in alone]
    gold(env, wanted[0])        # wins beside them
    for turn in range(1, max(map(len, alone))):
        for each, turns in zip(several, alone):
            if turn < len(turns):
                assert each.step(turns[turn][0]) == turns[turn][1:]
    several[0].close()
    assert wander(several[1], wanted[1]) == alone[1]
    for each in several:
        each.close()


@needs_engine
def test_threads_do_not_disturb_each_other(env, data, tasks):
    alone = {task: wander(env, task, 5) for task in list(tasks.values())[:3]}
    alfworld.ground.cache_clear()
    found = {}

    def play(task):
        mine = make_env("alfworld", {"data": data})
        found[task] = wander(mine, task, 5)
        mine.close()

    threads = [threading.Thread(target=play, args=(task,)) for task in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


@needs_engine
def test_a_closed_instance_can_start_again(data, tasks):
    env = make_env("alfworld", {"data": data})
    env.close()
    first = env.reset(task=tasks["pick_and_place_simple"], seed=0)
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="reset"):
        env.step("look")
    assert env.reset(task=tasks["pick_and_place_simple"], seed=0) == first
    env.close()


@needs_engine
def test_grounding_once_gives_the_packages_own_game(env, data, tasks):
    """Beside the package as its own code starts a game; and what is patched for it is put back."""
    PddlEnv, AlfredDemangler, EnvInfos, fast_downward = alfworld.engine()
    plain, argv, stdout = fast_downward.interface.pddl2sas, list(sys.argv), sys.stdout
    alfworld.ground.cache_clear()
    for task in (tasks["pick_clean_then_place_in_recep"], tasks["look_at_obj_in_light"]):
        turns = wander(env, task)
        assert wander(env, task) == turns
        assert fast_downward.pddl2sas is plain and sys.argv == argv and sys.stdout is stdout
        theirs = AlfredDemangler(PddlEnv(EnvInfos(admissible_commands=True, won=True)), shuffle=False)
        theirs.load(str(alfworld.games(env.folder, "test")[task]))
        state = theirs.reset()
        assert turns[0][1]["admissible"] == state.admissible_commands
        for action, observation, reward, terminated, _, info in turns[1:]:
            state, score, done = theirs.step(action)
            assert (reward, terminated) == (score, done) and info["admissible"] == state.admissible_commands
            assert observation.startswith(state.feedback.strip())
        sys.argv = argv
    assert alfworld.ground.cache_info().misses == 2


# --- published lists, histories, reflection ----------------------------------------------------------------------

def write_lists(folder, **splits):
    for name, files in splits.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "items.json").write_text(json.dumps([
            {"id": f"{name}:{n:04d}", "gamefile": str(file), "task_type": "any"} for n, file in enumerate(files)]))
    return str(folder)


def test_published_lists_of_games_by_path(data, tmp_path):
    """SkillOpt's form: relative paths from the folder above json_2.1.1, whatever split they come from, in their order."""
    root = alfworld.folder(data)
    found = {split: alfworld.games(root, split) for split in ("train", "valid", "test")}
    chosen = {"train": list(found["train"])[5:2:-1], "val": list(found["valid"])[:2], "test": list(found["test"])[7:9]}
    files = {name: ["json_2.1.1" / found[{"val": "valid"}.get(name, name)][task].relative_to(root) for task in tasks]
             for name, tasks in chosen.items()}
    paths = write_lists(tmp_path / "lists", **files)
    options = {"data": data, "paths": paths}
    assert [select_tasks("alfworld", split, None, options) for split in ("train", "valid", "test")] == list(chosen.values())
    absolute = write_lists(tmp_path / "absolute", train=[f"/elsewhere/{file}" for file in files["train"]])
    assert ALFWorld.tasks("train", data=data, paths=absolute) == chosen["train"]
    one_line("val/items.json", lambda: ALFWorld.tasks("valid", data=data, paths=absolute))
    gone = write_lists(tmp_path / "gone", train=["json_2.1.1/train/look_at_obj_in_light-X-None-Y-1/trial_T1/game.tw-pddl"])
    one_line("1 of the 1 games.*alfworld-download", lambda: ALFWorld.tasks("train", data=data, paths=gone))
    for number, bad in enumerate(("{", "[3]", '[{"id": "x"}]', '[{"gamefile": "x"}]', '[{"gamefile": "a/b/c/d"}]')):
        (tmp_path / f"{number}" / "train").mkdir(parents=True)
        (tmp_path / f"{number}" / "train" / "items.json").write_text(bad)
        one_line("train/items.json, a list of records", lambda: ALFWorld.tasks("train", data=data, paths=str(tmp_path / f"{number}")))


@needs_engine
def test_a_listed_game_is_played_and_another_is_unknown(data, tasks, tmp_path):
    root, (one, other) = alfworld.folder(data), list(tasks.values())[:2]
    file = "json_2.1.1" / alfworld.games(root, "test")[one].relative_to(root)
    env = make_env("alfworld", {"data": data, "paths": write_lists(tmp_path, train=[file], val=[], test=[])})
    assert "Your task is to" in env.reset(task=one, seed=0)[0]
    one_line("unknown task", lambda: env.reset(task=other, seed=0))
    env.close()


def fifty_turns(env, chat, task, how):
    """An episode of random admissible play with actions as long as the default allows, or of gold play."""
    rng, most = random.Random(task), ALFWorld.defaults["max_new_tokens"]
    reasoning = list(chat.text_ids("I looked there and saw nothing of use, so the next place is worth a try. " * 60))

    def act(prompts):
        answers = []
        for _ in prompts:
            listed = env._state.admissible_commands
            command = env.gold_action() if how == "gold" else rng.choice([*listed, "dance", "hm\nwell"])
            tail = [*chat.text_ids(f"\n<action>{command}</action>"), chat.tokenizer.eos_token_id]
            answers.append(reasoning[:most - len(tail)] + tail)
        return answers

    [t] = rollout(act, chat, [env], [Request(task)], max_turns=env.max_turns, max_new_tokens=most,
                  max_context=ALFWorld.defaults["max_context"] - 3500, history=ALFWorld.defaults["history"])
    return t


@needs_engine
@pytest.mark.parametrize("how", ["random", "gold"])
def test_fifty_turns_fit_by_default_and_reflection_holds_them(env, data, tasks, qwen3, how):
    """With 3,500 tokens to spare for a state. Reflection: every command and what came of it, no list, no reasoning."""
    chat = Chat(qwen3)
    t = fifty_turns(env, chat, tasks["pick_clean_then_place_in_recep"], how)
    assert (t.end, len(t.turns)) == ("turn_limit", 50) if how == "random" else t.end == "success"
    sizes = [len(turn.prompt_ids) for turn in t.turns]
    assert max(sizes) < 4000 and len(t.rows) >= len(t.turns) - 5
    prompts = [chat.tokenizer.decode(turn.prompt_ids) for turn in t.turns]
    assert [prompt.count("Commands:") for prompt in prompts] == [1] * len(prompts)
    text = env.reflection(t)
    assert len(text) < 6000 and "Commands:" not in text and "the next place" not in text and "Available commands" not in text
    lines = text.splitlines()
    assert [line[2:] for line in lines if line.startswith("> ")] == [
        command if (command := alfworld.parse_action(turn.action, alfworld.COMMAND.fullmatch)) else line for turn, line in zip(
            t.turns, ["(no command) " + turn.action[-100:].strip() for turn in t.turns])]
    for turn in t.turns:
        assert turn.observation.split("\nCommands:")[0].split("\nAvailable")[0] in text or "Available" in turn.observation


# --- hints -------------------------------------------------------------------------------------------------------

@needs_engine
def test_guidance_finds_back_after_a_detour_and_is_silent_where_it_does_not_fit(env, tasks):
    env.reset(task=tasks["pick_heat_then_place_in_recep"], seed=0)
    path = list(env._walkthrough)
    assert path[0].startswith("go to") and path[1].startswith("take")
    assert env.gold_action() == path[0] and env.action_guidance() == f"Hint: {path[0]}."
    env.step(path[0]), env.step("inventory")    # others between do no harm
    assert env.gold_action() == path[1]
    env.step("go to fridge 1")
    assert env.gold_action() == path[0]         # back first
    assert not env.step(path[1])[4]["valid"]    # out of reach, so it was not done
    assert env.gold_action() == path[0]
    env.step(path[0])
    assert env.gold_action() == path[1]
    for action in path[1:]:
        assert env.gold_action() == action
        _, reward, *_ = env.step(action)
    assert reward == 1.0

    env.reset(task=tasks["pick_two_obj_and_place"], seed=0)
    taken = next(command for command in env._walkthrough if command.startswith("take"))
    while env.gold_action() != taken:
        env.step(env.gold_action())
    env.step(taken), env.step(f"move {taken[5:].replace(' from ', ' to ')}")    # put back: no command of it takes it again
    while (action := env.gold_action()) is not None:
        assert not env.step(action)[2]
    assert env._walkthrough[env._followed].startswith("move") and env.action_guidance() is None


@needs_engine
def test_enrichment_says_where_hidden_things_are_and_says_the_truth(env, data, tasks):
    """What it names is found there: on six games, and on the first one whose thing is behind a door."""
    found = alfworld.games(alfworld.folder(data), "test")
    behind = next(task for task, file in found.items()
                  if json.loads(file.read_text())["walkthrough"][1].startswith("open"))
    was_closed = False
    for task in [behind, *tasks.values()]:
        first, _ = env.reset(task=task, seed=0)
        hint = env.observation_enrichment()
        assert hint.startswith("You are in the middle of the room. You carry nothing.")
        thing, place = [sentence.split(" is at ") for sentence in hint.rstrip(".").split(". ") if " is at " in sentence][0]
        assert thing not in first and thing.split()[0] in first       # a kind that the task names
        place, closed, _ = place.partition(", which is closed")
        seen = env.step(f"go to {place}")[0]
        if closed:
            was_closed = True
            assert f"{place} is closed" in seen and thing not in seen
            seen = env.step(f"open {place}")[0]
            assert f"{place}, which is closed" not in env.observation_enrichment()
        assert thing in seen.split("Commands:")[0] and place in env.observation_enrichment().split(".")[0]
    assert was_closed


@needs_engine
def test_enrichment_tells_what_is_carried_and_its_state(env, tasks):
    env.reset(task=tasks["pick_heat_then_place_in_recep"], seed=0)
    told = []
    for action in list(env._walkthrough)[:-1]:
        env.step(action)
        told.append(env.observation_enrichment())
    taken = next(command.split(" from ")[0][5:] for command in env._walkthrough if command.startswith("take"))
    assert f"You carry {taken}." in told[1] and f"You carry {taken} (hot)." in told[-1]


@needs_engine
@pytest.mark.parametrize("kind", ["pick_clean_then_place_in_recep", "pick_two_obj_and_place"])
def test_hints_change_nothing(env, data, tasks, kind):
    """The same actions, along the walkthrough and at random: the same everything, and the hint after it."""
    schedule = Schedule("both")
    assert schedule.why_no_hints(env, list(tasks.values()), 50) == ""
    hinted = EnrichedEnv(make_env("alfworld", {"data": data}), schedule)
    for play in ([action for *_, action in walk(env, tasks[kind])], [turn[0] for turn in wander(env, tasks[kind])[1:]]):
        plain, rich = env.reset(task=tasks[kind], seed=0), hinted.reset(task=tasks[kind], seed=0, enriched=True)
        hints = 0
        for action in [action for action in play if action]:
            assert rich[0] == (f"{plain[0]}\n{rich[-1]['hint']}" if "hint" in rich[-1] else plain[0])
            hints += "hint" in rich[-1]
            plain, rich = env.step(action), hinted.step(action)
            assert rich[1:4] == plain[1:4] and {k: v for k, v in rich[-1].items() if k != "hint"} == plain[-1]
        assert hints >= len(play) - 1
    hinted.close()


# --- all walkthroughs --------------------------------------------------------------------------------------------

def main(data=None):
    """Every test game by its stored walkthrough, through the environment; a line each, and the count."""
    if data is None:
        data = unpack(tempfile.mkdtemp())
    env, tasks = ALFWorld(data=data), ALFWorld.tasks("test", data=data)
    won = 0
    for task in tasks:
        turns = gold(env, task)
        won += turns[-1][1] == 1.0
        print(f"{'won ' if turns[-1][1] == 1.0 else 'lost'} {len(turns) - 1:3d} turns  {task}", flush=True)
    print(f"{won} of {len(tasks)} games won by their stored walkthrough")


if __name__ == "__main__":
    main(*sys.argv[1:])
