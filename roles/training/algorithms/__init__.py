"""What is optimised: advantages, losses, corrections and filters, put together by `objective`."""
