"""Commands that show runs and this machine: doctor, plot, report, view."""
