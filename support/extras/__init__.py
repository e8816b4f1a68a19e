"""Optional files. Delete any of them, or the folder, and training still runs."""
