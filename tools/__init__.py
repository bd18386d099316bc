"""What no reader of a training step needs: an episode shown, the two sides of bench.py, the template of a run's page."""
