"""What every other folder builds on: sizes, arrays, argument checks, records, kernel headers."""
