"""One model on one worker: schedule, run, commit. No network, no Ray; importing it loads no torch."""
