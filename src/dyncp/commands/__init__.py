"""The subcommands of `dyncp`: each module has `Command`, its options, and `run(command) -> exit code`."""
