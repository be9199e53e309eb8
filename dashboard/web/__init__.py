"""The app and its server: addresses, the opened run, files handed out, how the process starts."""
