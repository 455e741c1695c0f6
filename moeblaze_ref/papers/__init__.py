"""The papers, claim by claim: what they print, what their formulas give, what we measure, and a verdict on each."""
