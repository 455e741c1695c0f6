"""The questions of the quiz, by what they are about."""
