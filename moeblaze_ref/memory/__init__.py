"""The memory wall in numbers: formulas (accounting), measurement (measure), tables (report) and pictures (plots)."""
