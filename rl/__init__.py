"""One training step and what carries it. In the order of reading, from prompt to gradient:

    train.py       the loop, and the step that it shares with the Funnel: play, advantages, update
    rollout.py     episodes in environments; a row of tokens and its mask, made while sampling
    chat.py        prompts as token ids, which text from outside cannot forge
    sampling.py    plain `generate` and the draw of a token; cache.py: what is kept between turns
    learner.py     token log-probs, micro-batches, shares of a loss, optimizer steps

Around it: model.py (loading, LoRA), trial.py (is the model computed right?), policy.py (the policy of a run), evaluation.py,
options.py, runs.py (folder, checkpoint), logs.py, warmstart.py, tiny.py (the built-in model), stripped.py (the same episode under
other prompts), tokens.py (a log of tokens), memory.py and presets.py (what fits on a card).
"""
