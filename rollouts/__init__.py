"""How is a trajectory sampled, recorded, turned into samples, evaluated, synthesised?"""
