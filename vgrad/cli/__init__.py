"""The main job: train a classifier privately from the command line, and judge it."""
