"""The command `equipoise`."""
