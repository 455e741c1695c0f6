"""The papers, claim by claim: what each prints, what its formulas give, and what is measured here."""
