"""Model families: one folder each with its config, its module and its weight table, found through `registry`."""
