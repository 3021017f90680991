"""Other libraries, at the versions that are installed; one that is not is skipped."""
