"""How long a step of the engine takes on a GPU that is not here: for the simulator, the planner, the emulator and forecasts.

Pure Python: no clock, no torch, no file. docs/timing.md has the formulas, the sources and the measured error.
"""
