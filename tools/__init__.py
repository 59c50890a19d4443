"""The command ``sdp`` and its subcommands."""
