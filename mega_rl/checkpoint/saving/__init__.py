"""One rank's part of a save: staging, and the process that writes in the background."""
