"""The Experience Funnel around distill.py's equations. In the order of reading:

    rounds.py     the algorithm: Phase I and Phase II, their gates, what a round and the end report
    run.py        what it is done with: episodes, policies in and out of memory, phases kept on disk
    state.py      a state's entries, edits of it, the environment that shows it
    editors.py    who proposes edits: a language model and its prompts, or counting.py, for the built-in game
    edits.py      edits as models write them, read
    teacher.py    the teacher's log-probs, token weights, the gradient of Eq. 8
    retire.py     which entries a policy does without

options.py and results.py: the command line, the table and the picture of the rounds, the report at their end.
"""
