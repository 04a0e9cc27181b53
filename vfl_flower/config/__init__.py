"""The run configuration, the party rules, plugins, files and errors."""
