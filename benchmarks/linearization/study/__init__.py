"""Linearization study of a small model pretrained here: results of the runs, the report and the plots."""
