"""Asking the rules: selection and thresholds, triage, the findings as a document."""
