"""Other people's interfaces over exl3."""
