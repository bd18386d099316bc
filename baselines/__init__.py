"""Baselines of the Experience Funnel's table, one file each: opid.py, skillrl.py, skill0.py (docs/distill.md).

`loop.py` is the training run that they share, `skills.py` skills as text and who writes them. Nothing imports this room:
`python -m baselines.opid` runs a method, and `python distill.py --study` runs it as a process of its own.
"""
