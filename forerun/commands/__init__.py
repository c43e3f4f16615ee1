"""One module for each subcommand of `forerun`; none of them imports the engine before it runs."""
