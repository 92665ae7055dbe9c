"""Per-sample quantities: one transform each, several strategies behind them."""
