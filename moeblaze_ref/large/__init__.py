"""Cases with more than 2**31 elements: of each kernel a few blocks run, on arrays most of which are not there."""
