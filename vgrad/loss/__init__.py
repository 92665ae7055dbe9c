"""Code that runs inside of a loss: the function mode, and its handlers."""
