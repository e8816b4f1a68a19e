
def answer(text):
    return "=7" if len(text) % 2 else None

def fails(text):
    raise ArithmeticError("\x1b[31mboom")
