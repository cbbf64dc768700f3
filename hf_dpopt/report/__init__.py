"""Statement, report and model card of a run, and the scan before anything is published."""
