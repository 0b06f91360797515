"""SpecFold: verification passes in which a branch takes over what its fold parent has computed."""
