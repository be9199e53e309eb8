"""The app and its server: addresses, the run_view run, files handed out, how the process starts."""
