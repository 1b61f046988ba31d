"""SGLang servers as processes of the trainer's: settings, start, readiness, restart, end."""
